"""A launch made ready for one device: its parameters as bytes, and the call of the driver.

Everything that can be worked out beforehand is: a call copies the parameters to where the driver
reads them, stores the stream, and goes. What is launched again with the same parameters on the same
stream has a copy of its own of what the driver reads, and only goes.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from . import driver as _driver
from .driver import LaunchConfig, LaunchFunction, LoadedKernel, check

if TYPE_CHECKING:
    from .launch import Launch
    from .tensor_maps import DeviceMaps, MapOf

__all__ = ["Card", "bits", "picker"]

_INTEGERS = {
    "i32": (-(1 << 31), 1 << 31),
    "i64": (-(1 << 63), 1 << 63),
    "u32": (0, 1 << 32),
    "u64": (0, 1 << 64),
}


def bits(value: int | float, kind: str, what: str) -> int:
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
    return int(value) & ((1 << 64) - 1 if kind in ("i64", "u64") else (1 << 32) - 1)


#: How a number or an address of each type stands in the eight bytes of a parameter.
_PACKED = {"i32": "i4x", "u32": "I4x", "f32": "f4x", "i64": "q", "u64": "Q"}


#: What one call of the driver reads, never used by two threads at a time:
#:
#: * what the driver's function takes; the kernel's parameters, 8 bytes each; the configuration, in
#:   words of 8 bytes;
#: * what the driver is given to write down the current device, and where it does;
#: * what must live as long.
#:
#: A plain tuple is taken apart in a third of the time that attributes would take.
_Call = tuple[tuple[Any, ...], memoryview, memoryview, Any, memoryview, Any]


def _call(launch: Launch, kernel: Any, function: LaunchFunction) -> _Call:
    cuda = _driver.driver()
    count = max(len(launch.args), 1)
    values = bytearray(8 * count)
    start = ctypes.addressof(ctypes.c_char.from_buffer(values))
    addresses = (ctypes.c_uint64 * count)(*[start + 8 * i for i in range(count)])
    config = cuda.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
    config.sharedMemBytes = launch.shared_bytes
    attributes = launch_attributes(cuda, launch)
    if attributes:
        config.attrs = attributes
    config.numAttrs = len(attributes)
    words = (ctypes.c_uint64 * (ctypes.sizeof(LaunchConfig) // 8)).from_address(config.getPtr())
    here = ctypes.c_int()
    return (
        function.arguments(config, kernel, ctypes.addressof(addresses)),
        memoryview(values),
        memoryview(words).cast("B").cast("Q"),
        ctypes.byref(here),
        memoryview(here).cast("B").cast("i"),
        (config, addresses),
    )


_STREAM = LaunchConfig.stream.offset // 8

#: Streams for which a bound launch keeps what the driver reads.
_MOST_STREAMS = 8


class Card:
    """A launch made ready for one device.

    `names` says in which order `pack` takes values; an instance is called with what `pack` gave.
    `maps` are the device's tensor maps, of which the launch's are looked up or made when packing.
    """

    __slots__ = (
        "_alone", "_constants", "_free", "_function", "_kernel", "_launch", "_maps", "_model",
        "_ordinal", "_pack", "_pick", "_submit", "names",
    )  # fmt: skip

    def __init__(
        self, launch: Launch, ordinal: int, loaded: LoadedKernel, maps: DeviceMaps | None = None
    ) -> None:
        kernel = launch.program.kernel
        self.names = launch.names
        names = (*self.names, *[name for name, _ in launch.maps])
        self._maps: tuple[DeviceMaps, list[tuple[MapOf, int, dict[int, int]]]] | None = None
        if maps is not None:
            # Of each map also where it is by the buffer's address: maps stay, and hashing what one
            # says takes longer than the rest of packing.
            self._maps = maps, [(one, self.names.index(one.buffer), {}) for _, one in launch.maps]
        self._launch, self._ordinal, self._kernel = launch, ordinal, loaded.handle
        self._function = LaunchFunction()
        self._submit = self._function.call
        self._alone = _driver.count_devices() == 1
        order: list[int] = []
        constants: list[int] = []
        layout = "<"
        for value, kind in zip(launch.args, kernel.parameters, strict=True):
            if isinstance(value, str):
                order.append(names.index(value))
                layout += _PACKED.get(kind, "Q")
            else:
                order.append(len(names) + len(constants))
                constants.append(bits(value, kind, kernel.name))
                layout += "Q"
        self._constants = tuple(constants)
        self._pick = picker(order)
        self._pack = struct.Struct(layout if order else "8x").pack
        # Calls not in use. Popping and appending are atomic, so threads share it without a lock.
        self._free: list[_Call] = []
        # The first of them, of which copies are made.
        self._model: _Call | None = None

    def pack(self, values: Sequence[Any]) -> bytes:
        """The kernel's parameters; ValueError: one cannot hold its value."""
        if self._maps is not None:
            maps, wanted = self._maps
            places = []
            for one, at, known in wanted:
                buffer = values[at]
                place = known.get(buffer)
                if place is None:
                    place = known[buffer] = maps.address(one, buffer)
                places.append(place)
            values = (*values, *places)
        try:
            return self._pack(*self._pick((*values, *self._constants)))
        except (struct.error, OverflowError):
            return self._pack_slowly(values)

    def _pack_slowly(self, values: Sequence[Any]) -> bytes:
        """The same for numbers that `struct` refuses: floats that round to infinity, say."""
        kinds, args = self._launch.program.kernel.parameters, self._launch.args
        packed = b""
        for value, kind, arg in zip(
            self._pick((*values, *self._constants)), kinds, args, strict=True
        ):
            number = isinstance(arg, str) and not kind.endswith("*")
            packed += struct.pack(
                "<Q", bits(value, kind, self._launch.program.label) if number else value
            )
        return packed

    def _new(self) -> _Call:
        made = _call(self._launch, self._kernel, self._function)
        if self._model is None:
            self._model = made
        return made

    def _copy(self, parameters: bytes, stream: int) -> tuple[Any, ...]:
        """What the driver's function takes for these parameters on this stream, now and later.

        The driver only reads it, so threads may share it. The copy of the configuration points to
        the attributes of the model, which lives as long as this object.
        """
        model = self._model or self._new()
        config = (ctypes.c_uint64 * len(model[2])).from_buffer_copy(model[2])
        config[_STREAM] = stream
        count = len(parameters) // 8
        memory = (ctypes.c_uint64 * (2 * count))()
        start = ctypes.addressof(memory) + 8 * count
        memory[:count] = [*range(start, start + 8 * count, 8)]
        ctypes.memmove(start, parameters, 8 * count)
        return ctypes.byref(config), model[0][1], ctypes.byref(memory), None

    def __call__(self, parameters: bytes, stream: int) -> None:
        """Launch on the current device, which must be this one."""
        status = self._submitted(parameters, stream)
        if status != 0:
            self._failed(status)

    def _submitted(self, parameters: bytes, stream: int) -> int:
        """The driver's answer to a launch on the current device."""
        try:
            call = self._free.pop()
        except IndexError:
            call = self._new()
        arguments, memory, config, *_ = call
        memory[:] = parameters
        config[_STREAM] = stream
        status = self._submit(*arguments)
        self._free.append(call)
        return status

    def once(self, parameters: bytes, stream: int) -> None:
        """Launch, whichever device is current."""
        if self._alone:
            status = self._submitted(parameters, stream)
            if status != 0:
                self._failed_alone(status, parameters, stream)
        elif _driver.current_ordinal() == self._ordinal:
            self(parameters, stream)
        else:
            with _driver.on_device(self._ordinal):
                self(parameters, stream)

    def bound(self, parameters: bytes) -> Callable[[int], None]:
        """What launches on a stream, whichever device is current.

        All that it needs are variables of a closure: this is what calls that are repeated run, and
        half of the host's time that is not the driver's would be calls from one method to another.
        """
        if self._alone and self._function.direct:
            return self._bound_alone(parameters)
        free, new, failed, ordinal = self._free, self._new, self._failed, self._ordinal
        take, give = free.pop, free.append
        submit, ask, word = self._submit, self._function.ask, _STREAM

        def launch(stream: int = 0) -> None:
            try:
                call = take()
            except IndexError:
                call = new()
            arguments, memory, config, place, here, _ = call
            if ask(place) == 0 and here[0] == ordinal:
                memory[:] = parameters
                config[word] = stream
                status = submit(*arguments)
                give(call)
                if status != 0:
                    failed(status)
                return
            give(call)
            with _driver.on_device(ordinal):
                self(parameters, stream)

        return launch

    def _bound_alone(self, parameters: bytes) -> Callable[[int], None]:
        """`bound` where there is one device: it is current, or none, and then nothing runs."""
        submit, submitted, failed = self._submit, self._submitted, self._failed_alone
        copy, most = self._copy, _MOST_STREAMS
        # Stream -> what the driver's function takes; None: there was one launch on it. Made with
        # the second one: addresses that never come back are not worth it.
        known: dict[int, tuple[Any, ...] | None] = {}
        find = known.get

        def launch(stream: int = 0) -> None:
            arguments = find(stream)
            if arguments is not None:
                status = submit(*arguments)
            else:
                if stream in known:
                    known[stream] = copy(parameters, stream)
                else:
                    if len(known) >= most:
                        known.clear()
                    known[stream] = None
                status = submitted(parameters, stream)
            if status != 0:
                failed(status, parameters, stream)

        return launch

    def _failed_alone(self, status: int, parameters: bytes, stream: int) -> None:
        """Launch anew if the only device was not current."""
        if _driver.current_ordinal() == self._ordinal:
            self._failed(status)
        with _driver.on_device(self._ordinal):
            self(parameters, stream)

    def _failed(self, status: int) -> None:
        launch = self._launch
        check(
            (_driver.driver().CUresult(status),),
            f"launching {launch.program.label} on device {self._ordinal} (grid {launch.grid}, "
            f"block {launch.block}, {launch.shared_bytes} bytes of shared memory)",
        )


def picker(order: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """What picks the items at these places out of a tuple, as a tuple; a function in C."""
    if len(order) > 1:
        return itemgetter(*order)
    # Of one item, `itemgetter` gives no tuple, but of a slice it does.
    (at,) = order or (0,)
    return itemgetter(slice(at, at + len(order)))


def launch_attributes(cuda: Any, launch: Launch) -> list[Any]:
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
