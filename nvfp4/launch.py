"""Run programs: on the card, or on the simulated machine.

A :class:`Launch` says which program runs, on how many threads and with which arguments, and knows
no array: its arguments are numbers, or names. :func:`run` binds the caller's arrays to the names.
What a launch needs on a device (built, loaded, its parameters laid out) is made once and kept with
the launch; after that it costs the host a look at the current device, one store an argument and one
call of the driver. The driver is called directly (``cuda.bindings``): importing ``cuda.core`` costs
0.3 s, which a process whose kernels are all in the cache need not pay.
"""

from __future__ import annotations

import functools
import struct
import threading
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from . import compile as compiler
from .architectures import ARCHITECTURES, check_supported
from .arrays import Array, host
from .driver import (
    LoadedKernel,
    check,
    current_device,
    device_info,
    driver,
    is_capturing,
    launch_function,
    load,
    on_device,
    reserve_shared,
)
from .program import Program, SimulatorWorld

__all__ = ["Launch", "Prepared", "architecture", "prepare", "run"]

Extent = tuple[int, int, int]
Buffer = Array | int | float | None

_INTEGERS = {
    "i32": (-(1 << 31), 1 << 31),
    "i64": (-(1 << 63), 1 << 63),
    "u32": (0, 1 << 32),
    "u64": (0, 1 << 64),
}
_SLOT = (1 << 64) - 1


@dataclass(frozen=True)
class Launch:
    """One kernel launch without its arrays.

    Parameters
    ----------
    program
        What runs.
    grid, block
        Extents: a number, or up to three. A grid with a zero in it is nothing to do.
    shared_bytes
        Dynamic shared memory of a block.
    args
        One an argument of the kernel: a number, passed by value, or a name, to be given a value
        by :func:`run`: an array where the kernel takes a pointer (None: a null pointer), a number
        where it takes a number.
    cluster
        Blocks of a cluster.
    programmatic
        Let the launch begin before the kernel ahead of it in the stream has ended; the body then
        waits by ``griddepcontrol.wait`` before it touches what that kernel writes.

    Raises
    ------
    ValueError
        Another number of arguments than the kernel has, a number that its type cannot hold, or
        extents that are no extents.
    """

    program: Program
    grid: Extent
    block: Extent
    shared_bytes: int
    args: tuple[int | float | str, ...]
    cluster: Extent = (1, 1, 1)
    programmatic: bool = False
    _cards: dict[int, _Card] = field(
        default_factory=dict, init=False, repr=False, compare=False, hash=False
    )

    def __post_init__(self) -> None:
        kernel = self.program.kernel
        for name in ("grid", "block", "cluster"):
            object.__setattr__(self, name, _extent(getattr(self, name), f"{kernel.name}: {name}"))
        if 0 in self.block or 0 in self.cluster:
            raise ValueError(f"{kernel.name}: block and cluster must be positive; got {self}")
        args = tuple(self.args)
        object.__setattr__(self, "args", args)
        if len(args) != len(kernel.parameters):
            raise ValueError(
                f"{kernel.name} takes {len(kernel.parameters)} arguments; got {len(args)}"
            )
        for value, kind in zip(args, kernel.parameters, strict=True):
            if not isinstance(value, str):
                _bits(value, kind, kernel.name)
        threads = self.program.threads
        if threads and int(np.prod(self.block)) != threads:
            raise ValueError(
                f"{kernel.name} runs {threads} threads a block; got {self.block}"
            )

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return 0 in self.grid

    @property
    def names(self) -> tuple[str, ...]:
        """The names among the arguments, each once, in order."""
        return tuple(dict.fromkeys(value for value in self.args if isinstance(value, str)))


def _extent(value: Any, what: str) -> Extent:
    numbers = (value,) if isinstance(value, (int, np.integer)) else tuple(value)
    if not 1 <= len(numbers) <= 3 or any(int(n) != n or n < 0 for n in numbers):
        raise ValueError(f"{what} must be one to three numbers, none negative; got {value!r}")
    x, y, z = (*map(int, numbers), 1, 1)[:3]
    return x, y, z


def _bits(value: int | float, kind: str, what: str) -> int:
    """A number as it stands in a kernel's parameter, in the low bits of 64."""
    if kind == "f32":
        try:
            return int.from_bytes(struct.pack("<f", value), "little")
        except OverflowError:  # struct refuses what rounds to infinity
            with np.errstate(over="ignore"):
                return int(np.float32(value).view(np.uint32))
    if kind not in _INTEGERS:
        raise ValueError(
            f"{what}: a parameter of type {kind} takes the name of a buffer; got {value!r}"
        )
    low, high = _INTEGERS[kind]
    if int(value) != value or not low <= value < high:
        raise ValueError(f"{what}: a parameter of type {kind} cannot hold {value!r}")
    return int(value) & _SLOT


# --- on the card ----------------------------------------------------------------------------------


@functools.cache
def architecture(device: int) -> str:
    """The target that a device's kernels are built for, such as ``"sm_90a"``.

    Raises
    ------
    ToolchainError
        There is no driver.
    UnsupportedError
        No target's code runs on it.
    """
    return device_info(device).arch


class _Call(NamedTuple):
    """What one call of the driver reads; never used by two threads at a time."""

    slots: array[int]  # the parameters, 8 bytes each
    pointers: array[int]  # their addresses, in order
    address: int  # of `pointers`
    config: Any
    stream: list[int]  # the handle that is in `config`


class _Card:
    """A launch made ready for one device: call it with the values of `names` and a stream.

    `names` says in which order the values come; a launch of several has its names among theirs.
    """

    __slots__ = (
        "_fixed", "_free", "_kernel", "_launch", "_launch_kernel", "_numbers", "_ordinal",
        "_pointers", "_stream", "names",
    )  # fmt: skip

    def __init__(
        self, launch: Launch, ordinal: int, loaded: LoadedKernel, names: tuple[str, ...]
    ) -> None:
        kernel = launch.program.kernel
        self.names = names
        self._launch, self._ordinal, self._kernel = launch, ordinal, loaded.handle
        self._launch_kernel, self._stream = launch_function(), driver().CUstream
        self._fixed = [0] * len(launch.args)
        self._pointers: list[tuple[int, int]] = []
        self._numbers: list[tuple[int, int, str]] = []
        for slot, (value, kind) in enumerate(zip(launch.args, kernel.parameters, strict=True)):
            if not isinstance(value, str):
                self._fixed[slot] = _bits(value, kind, kernel.name)
            elif kind.endswith("*"):
                self._pointers.append((slot, names.index(value)))
            else:
                self._numbers.append((slot, names.index(value), kind))
        # Calls not in use. Popping and appending are atomic, so threads share it without a lock.
        self._free: list[_Call] = []

    def __call__(self, values: Sequence[Any], stream: int) -> None:
        """Launch on the current device, which must be this one."""
        try:
            call = self._free.pop()
        except IndexError:
            call = self._new_call()
        slots = call.slots
        for slot, index in self._pointers:
            slots[slot] = values[index]
        for slot, index, kind in self._numbers:
            slots[slot] = _bits(values[index], kind, self._launch.program.label)
        if call.stream[0] != stream:
            call.config.hStream = self._stream(stream)
            call.stream[0] = stream
        status = self._launch_kernel(call.config, self._kernel, call.address)
        self._free.append(call)
        if status != 0:
            launch = self._launch
            check(
                (driver().CUresult(status),),
                f"launching {launch.program.label} on device {self._ordinal} (grid {launch.grid}, "
                f"block {launch.block}, {launch.shared_bytes} bytes of shared memory)",
            )

    def _new_call(self) -> _Call:
        cuda, launch = driver(), self._launch
        slots = array("Q", self._fixed or [0])
        start = slots.buffer_info()[0]
        pointers = array("Q", [start + 8 * i for i in range(len(slots))])
        config = cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
        config.sharedMemBytes = launch.shared_bytes
        attributes = _attributes(cuda, launch)
        if attributes:
            config.attrs = attributes
        config.numAttrs = len(attributes)
        return _Call(slots, pointers, pointers.buffer_info()[0], config, [0])


def _attributes(cuda: Any, launch: Launch) -> list[Any]:
    kinds, made = cuda.CUlaunchAttributeID, []
    if launch.cluster != (1, 1, 1):
        attribute = cuda.CUlaunchAttribute()
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        extent = attribute.value.clusterDim
        extent.x, extent.y, extent.z = launch.cluster
        made.append(attribute)
    if launch.programmatic:
        attribute = cuda.CUlaunchAttribute()
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        made.append(attribute)
    return made


_loaded: dict[tuple[Program, str], LoadedKernel] = {}
_loading = threading.RLock()


def _ready(launch: Launch, ordinal: int, stream: int) -> LoadedKernel:
    """The launch's kernel, loaded on a device and allowed its shared memory; built if need be."""
    program, arch = launch.program, architecture(ordinal)
    with _loading, on_device(ordinal):
        loaded = _loaded.get((program, arch))
        if loaded is None:
            binary = compiler.find(program, arch)
            if binary is None:
                if is_capturing(stream):
                    raise RuntimeError(
                        f"kernel {program.label} is not built yet for {arch}, and nothing can be "
                        "built while a stream is being captured into a graph: make the same call "
                        "once before the capture, or fill the cache with `nvfp4 compile --shapes`"
                    )
                binary = compiler.build(program, arch)
            loaded = _loaded[program, arch] = load(binary)
        reserve_shared(loaded, ordinal, launch.shared_bytes)
    return loaded


class Prepared:
    """Launches made ready for one device: built, loaded, their parameters laid out.

    Made by :func:`prepare`. Threads may share it.

    Attributes
    ----------
    names
        What :meth:`__call__` wants values for, in this order.
    device
        The ordinal.
    """

    def __init__(self, launches: Iterable[Launch], device: int, stream: int = 0) -> None:
        real = [launch for launch in launches if not launch.empty]
        self.device = device
        self.names = tuple(dict.fromkeys(name for launch in real for name in launch.names))
        self._cards = [
            _Card(launch, device, _ready(launch, device, stream), self.names) for launch in real
        ]

    def __call__(self, values: Sequence[int | float], stream: int = 0) -> None:
        """Launch, all on one stream.

        Parameters
        ----------
        values
            A device pointer, or number, for each of `names`; 0 is a null pointer.
        stream
            A ``CUstream``'s handle; 0 is the legacy default stream.
        """
        if not self._cards:
            return
        status, current = driver().cuCtxGetDevice()
        if status == 0 and int(current) == self.device:
            for card in self._cards:
                card(values, stream)
        else:
            with on_device(self.device):
                for card in self._cards:
                    card(values, stream)


def prepare(launches: Iterable[Launch], device: int | None = None, *, stream: int = 0) -> Prepared:
    """Make launches ready on a device, so that calling the result only launches.

    Parameters
    ----------
    launches
        In the order in which they run; empty ones are left out.
    device
        An ordinal; None: the current device.
    stream
        The stream that will be used: nothing is built while it is being captured.

    Raises
    ------
    ToolchainError
        There is no driver, or a compiler is needed and missing.
    UnsupportedError
        A kernel is not made for the device.
    RuntimeError
        A kernel must be built, and `stream` is being captured.
    """
    return Prepared(launches, current_device() if device is None else device, stream)


def run(
    launches: Iterable[Launch],
    buffers: Mapping[str, Buffer],
    *,
    stream: int = 0,
    device: int | None = None,
    machine: Any = None,
) -> None:
    """Run launches one after the other.

    Parameters
    ----------
    launches
        From ``nvfp4.plans``. Keep and pass the same objects: what they need is kept with them.
    buffers
        Name -> the array, None for a null pointer, or the number.
    stream
        A ``CUstream``'s handle.
    device
        An ordinal; None: the current device. It need not be current.
    machine
        A simulated machine (``nvfp4.simulate``) to run on instead; the arrays are then the host's.
        One with a method ``record`` is given each launch, and nothing runs (``nvfp4.warm``).

    Raises
    ------
    KeyError
        A name has no value.
    ToolchainError, UnsupportedError, RuntimeError
        See :func:`prepare`.
    """
    if machine is not None:
        record = getattr(machine, "record", None)
        if record is None:
            _simulate(launches, buffers, machine)
        else:
            for launch in launches:
                record(launch)
        return
    ordinal = current_device() if device is None else device
    status, current = driver().cuCtxGetDevice()
    if status == 0 and int(current) == ordinal:
        _run(launches, buffers, stream, ordinal)
    else:
        with on_device(ordinal):
            _run(launches, buffers, stream, ordinal)


def _run(
    launches: Iterable[Launch], buffers: Mapping[str, Buffer], stream: int, ordinal: int
) -> None:
    for launch in launches:
        card = launch._cards.get(ordinal)
        if card is None:
            if launch.empty:
                continue
            loaded = _ready(launch, ordinal, stream)
            card = launch._cards[ordinal] = _Card(launch, ordinal, loaded, launch.names)
        try:
            values = [
                buffer.pointer if type(buffer) is Array else buffer or 0
                for buffer in map(buffers.__getitem__, card.names)
            ]
        except KeyError as error:
            raise _missing(error, launch, buffers) from None
        card(values, stream)


def _missing(error: KeyError, launch: Launch, buffers: Mapping[str, Buffer]) -> KeyError:
    return KeyError(
        f"{launch.program.label} needs a value for {error.args[0]!r}; got {sorted(buffers)}"
    )


# --- on the simulated machine ---------------------------------------------------------------------


def _simulate(launches: Iterable[Launch], buffers: Mapping[str, Buffer], machine: Any) -> None:
    from .sim import pointer_to

    for launch in launches:
        if launch.empty:
            continue
        kernel = launch.program.kernel
        if machine.arch in ARCHITECTURES:
            check_supported(kernel, machine.arch)
        args: list[Any] = []
        for value, kind in zip(launch.args, kernel.parameters, strict=True):
            name = value if isinstance(value, str) else ""
            given: Any = value
            if name:
                try:
                    given = buffers[name]
                except KeyError as error:
                    raise _missing(error, launch, buffers) from None
            if kind.endswith("*"):
                memory = np.empty(0, np.uint8) if given is None else host(given)
                args.append(pointer_to(memory, kind[:-1], name))
            else:
                _bits(given, kind, launch.program.label)
                args.append(np.float32(given) if kind == "f32" else int(given))
        machine.run(
            _simulated(launch.program),
            launch.grid,
            launch.block,
            launch.shared_bytes,
            args,
            name=launch.program.label,
            cluster=launch.cluster,
        )


@functools.lru_cache(maxsize=256)
def _simulated(program: Program) -> Callable[..., Any]:
    from .sim import cuda

    return program.bind(SimulatorWorld(cuda))
