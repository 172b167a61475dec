"""Run programs: on the card, or on the simulated machine.

A :class:`Launch` says which program runs, on how many threads and with which arguments, and knows
no array: its arguments are numbers, or names. :func:`run` binds the caller's arrays to the names.
What a launch needs on a device (built, loaded, its parameters laid out) is made once and kept with
the launch; after that it costs the host a look at the current device, the packing of the arguments
and one call of the driver. The driver is called directly: importing ``cuda.core`` costs 0.3 s,
which a process whose kernels are all in the cache need not pay.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from . import compile as compiler
from ._card import Card, bits, picker
from .architectures import ARCHITECTURES, check_supported
from .arrays import Array, as_array, host
from .driver import (
    LoadedKernel,
    current_device,
    current_ordinal,
    device_info,
    is_capturing,
    load,
    on_device,
    reserve_shared,
)
from .program import Program, SimulatorWorld

if TYPE_CHECKING:
    from .tensor_maps import DeviceMaps, MapOf

__all__ = ["Launch", "Prepared", "architecture", "prepare", "run"]

Extent = tuple[int, int, int]
Buffer = Array | int | float | None


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
    maps
        Names among `args` that stand for tensor maps of buffers, and what those maps say.

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
    maps: tuple[tuple[str, MapOf], ...] = ()
    _cards: dict[int, Card] = field(
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
                bits(value, kind, kernel.name)
        for name, _ in self.maps:
            if name not in args:
                raise ValueError(f"{kernel.name}: the map {name!r} is no argument; got {args}")
        threads = self.program.threads
        if threads and int(np.prod(self.block)) != threads:
            raise ValueError(f"{kernel.name} runs {threads} threads a block; got {self.block}")

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return 0 in self.grid

    @property
    def programs(self) -> tuple[Program, ...]:
        """What must be built for it: its own program, and what writes its tensor maps."""
        return (self.program, _map_writer()) if self.maps else (self.program,)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of buffers, each once: those among the arguments, in order, and of maps."""
        maps = dict(self.maps)
        given = [value for value in self.args if isinstance(value, str) and value not in maps]
        return tuple(dict.fromkeys([*given, *[one.buffer for one in maps.values()]]))


def _extent(value: Any, what: str) -> Extent:
    numbers = (value,) if isinstance(value, (int, np.integer)) else tuple(value)
    if not 1 <= len(numbers) <= 3 or any(int(n) != n or n < 0 for n in numbers):
        raise ValueError(f"{what} must be one to three numbers, none negative; got {value!r}")
    x, y, z = (*map(int, numbers), 1, 1)[:3]
    return x, y, z


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


def _card(launch: Launch, ordinal: int, stream: int) -> Card:
    """A launch that is not empty, ready on a device; made once."""
    card = launch._cards.get(ordinal)
    if card is None:
        loaded = _ready(launch, ordinal, stream)
        maps = _device_maps(ordinal, stream) if launch.maps else None
        card = launch._cards[ordinal] = Card(launch, ordinal, loaded, maps)
    return card


def _device_maps(ordinal: int, stream: int) -> DeviceMaps:
    from .tensor_maps import maps_on

    return maps_on(ordinal, _write_map(ordinal, stream))


def _map_writer() -> Program:
    from .kernels.tensor_map import WRITE_TENSOR_MAP

    return WRITE_TENSOR_MAP.program()


def _write_map(ordinal: int, stream: int) -> Callable[[int, Sequence[int], int], None]:
    """What writes the words of a tensor map to an address, on a stream."""
    names = ("target", *(f"word{i}" for i in range(16)))
    write = Launch(_map_writer(), (1, 1, 1), (1, 1, 1), 0, names)
    card = _card(write, ordinal, stream)

    def to(address: int, values: Sequence[int], on: int) -> None:
        card(card.pack((address, *values)), on)

    return to


class Prepared:
    """Launches made ready for one device: built, loaded, their parameters laid out.

    Made by :func:`prepare`. Threads may share it.

    Attributes
    ----------
    names
        What :meth:`bind` and :meth:`__call__` want values for, in this order.
    device
        The ordinal.
    """

    def __init__(self, launches: Iterable[Launch], device: int, stream: int = 0) -> None:
        cards = [_card(launch, device, stream) for launch in launches if not launch.empty]
        self.device = device
        self.names = tuple(dict.fromkeys(name for card in cards for name in card.names))
        self._cards = [
            (card, picker([self.names.index(name) for name in card.names])) for card in cards
        ]

    def bind(self, values: Sequence[int | float]) -> Callable[[int], None]:
        """The launches with their arguments: what is left is to call it with a stream.

        The result knows addresses, and keeps no array alive: whoever calls it has them. Threads may
        share it.

        Parameters
        ----------
        values
            A device pointer, or number, for each of `names`; 0 is a null pointer.

        Raises
        ------
        ValueError
            A parameter cannot hold its number.
        """
        given = tuple(values)
        bound = [card.bound(card.pack(pick(given))) for card, pick in self._cards]
        if len(bound) == 1:  # most calls are one launch
            return bound[0]

        def launch(stream: int = 0) -> None:
            for one in bound:
                one(stream)

        return launch

    def __call__(self, values: Sequence[int | float], stream: int = 0) -> None:
        """Launch, all on one stream.

        Parameters
        ----------
        values
            As :meth:`bind` takes them.
        stream
            A ``CUstream``'s handle; 0 is the legacy default stream.
        """
        given = tuple(values)
        for card, pick in self._cards:
            card.once(card.pack(pick(given)), stream)


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
    if current_ordinal() == ordinal:
        _run(launches, buffers, stream, ordinal)
    else:
        with on_device(ordinal):
            _run(launches, buffers, stream, ordinal)


def _run(
    launches: Iterable[Launch], buffers: Mapping[str, Buffer], stream: int, ordinal: int
) -> None:
    for launch in launches:
        if launch.empty:
            continue
        card = _card(launch, ordinal, stream)
        try:
            values = [
                buffer.pointer if type(buffer) is Array else buffer or 0
                for buffer in map(buffers.__getitem__, card.names)
            ]
        except KeyError as error:
            raise _missing(error, launch, buffers) from None
        card(card.pack(values), stream)


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
        maps = _simulated_maps(launch, buffers)
        for value, kind in zip(launch.args, kernel.parameters, strict=True):
            name = value if isinstance(value, str) else ""
            given: Any = value
            if name:
                try:
                    given = maps[name] if name in maps else buffers[name]
                except KeyError as error:
                    raise _missing(error, launch, buffers) from None
            if kind.endswith("*"):
                memory = np.empty(0, np.uint8) if given is None else host(given)
                args.append(pointer_to(memory, kind[:-1], name))
            else:
                bits(given, kind, launch.program.label)
                args.append(np.float32(given) if kind == "f32" else int(given))
        machine.run(
            _simulated(launch.program),
            launch.grid,
            launch.block,
            launch.shared_bytes,
            args,
            name=launch.program.label,
            cluster=launch.cluster,
            launch_bounds=(launch.program.threads, launch.program.blocks_per_sm),
        )


def _simulated_maps(launch: Launch, buffers: Mapping[str, Buffer]) -> dict[str, Array]:
    """The launch's tensor maps as the simulated machine reads them."""
    made = {}
    for name, one in launch.maps:
        try:
            buffer = buffers[one.buffer]
        except KeyError as error:
            raise _missing(error, launch, buffers) from None
        made[name] = as_array(one.simulated(host(buffer).ctypes.data), name)  # type: ignore[arg-type]
    return made


@functools.lru_cache(maxsize=256)
def _simulated(program: Program) -> Callable[..., Any]:
    from .sim import cuda

    return program.bind(SimulatorWorld(cuda))
