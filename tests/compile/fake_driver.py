"""A CUDA driver without a GPU: keeps contexts and capture modes, records launches.

The structures of a launch are the real ones of ``cuda.bindings``; only the calls are not. What a
launch would read is read at the moment of the launch, from the same addresses.
"""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from cuda.bindings import driver as real

from nvfp4.driver import LaunchConfig

OK = real.CUresult.CUDA_SUCCESS
CONTEXT = 0x1000
RELAXED = real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
GLOBAL = real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
IS_CAPTURING = real.CUstreamCaptureStatus
_ATTRIBUTES = real.CUdevice_attribute


@dataclass
class Launched:
    """What one launch was given."""

    device: int
    kernel: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    stream: int
    parameters: tuple[int, ...]
    cluster: tuple[int, int, int] | None
    programmatic: bool


@dataclass
class FakeDriver:
    """Stands in for the module ``cuda.bindings.driver``."""

    count: int = 2
    cc: tuple[int, int] = (9, 0)
    shared_bytes: int = 227 * 1024
    #: How many parameters a launch has.
    parameters: int = 3
    capturing: set[int] = field(default_factory=set)
    #: Name of a call -> the status that it returns from now on.
    broken: dict[str, Any] = field(default_factory=dict)
    #: Seconds that a launch takes to read its parameters.
    slow: float = 0.0
    loaded: list[bytes] = field(default_factory=list)
    modes_at_load: list[Any] = field(default_factory=list)
    attributes: list[tuple[int, int]] = field(default_factory=list)
    launches: list[Launched] = field(default_factory=list)
    configs: int = 0
    #: Launches that were asked for, whatever became of them.
    attempts: int = 0

    def __post_init__(self) -> None:
        self._thread = threading.local()

    def __getattr__(self, name: str) -> Any:  # types and enumerations
        return getattr(real, name)

    # Contexts

    @property
    def stack(self) -> list[int]:
        """The devices whose contexts this thread has pushed; the last is current."""
        if not hasattr(self._thread, "stack"):
            self._thread.stack = []
        return self._thread.stack

    @property
    def mode(self) -> Any:
        """This thread's capture mode."""
        return getattr(self._thread, "mode", GLOBAL)

    def cuDeviceGetCount(self) -> Any:
        return OK, self.count

    def cuDeviceGet(self, ordinal: int) -> Any:
        return OK, ordinal

    def cuDeviceGetName(self, length: int, device: int) -> Any:
        return OK, b"Pretended\0\0"

    def cuDeviceGetAttribute(self, kind: Any, device: int) -> Any:
        return OK, {
            _ATTRIBUTES.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: self.cc[0],
            _ATTRIBUTES.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: self.cc[1],
            _ATTRIBUTES.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 132,
            _ATTRIBUTES.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: self.shared_bytes,
        }[kind]

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        return OK, CONTEXT + device

    def cuCtxGetDevice(self) -> Any:
        if not self.stack:
            return real.CUresult.CUDA_ERROR_INVALID_CONTEXT, None
        return OK, self.stack[-1]

    def cuCtxPushCurrent(self, context: int) -> Any:
        self.stack.append(context - CONTEXT)
        return (OK,)

    def cuCtxPopCurrent(self) -> Any:
        return OK, CONTEXT + self.stack.pop()

    # Capture

    def cuStreamIsCapturing(self, stream: Any) -> Any:
        if int(stream) == 0 and self.capturing:
            return real.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, None
        active = int(stream) in self.capturing
        return OK, (
            IS_CAPTURING.CU_STREAM_CAPTURE_STATUS_ACTIVE
            if active
            else IS_CAPTURING.CU_STREAM_CAPTURE_STATUS_NONE
        )

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        before, self._thread.mode = self.mode, mode
        return OK, before

    # Kernels

    def cuLibraryLoadData(self, code: bytes, *options: Any) -> Any:
        if "load" in self.broken:
            return self.broken["load"], None
        self.modes_at_load.append(self.mode)
        self.loaded.append(bytes(code))
        return OK, 0x2000 + len(self.loaded)

    def cuLibraryGetKernel(self, library: int, name: bytes) -> Any:
        assert name in self.loaded[library - 0x2001]
        return OK, 0x3000 + library - 0x2000

    def cuKernelGetFunction(self, kernel: int) -> Any:
        self.modes_at_load.append(self.mode)
        return OK, 0x4000

    def cuKernelSetAttribute(self, kind: Any, value: int, kernel: int, device: int) -> Any:
        assert kind == (
            real.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        )
        self.attributes.append((device, value))
        return (OK,)

    def CUlaunchConfig(self) -> Any:
        self.configs += 1
        return real.CUlaunchConfig()

    def cuLaunchKernelEx(self, config: Any, kernel: Any, parameters: int, extra: int) -> Any:
        assert extra == 0
        self.attempts += 1
        if not self.stack:
            return (real.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if "launch" in self.broken:
            return (self.broken["launch"],)
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        block = (config.blockDimX, config.blockDimY, config.blockDimZ)
        stream = int(config.hStream)
        addresses = (ctypes.c_uint64 * self.parameters).from_address(parameters)
        values = []
        for address in addresses:
            time.sleep(self.slow)  # another thread may run now, as in the real call
            values.append(ctypes.c_uint64.from_address(address).value)
        cluster, programmatic = None, False
        kinds = real.CUlaunchAttributeID
        for attribute in list(config.attrs)[: config.numAttrs]:
            if attribute.id == kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
                extent = attribute.value.clusterDim
                cluster = (extent.x, extent.y, extent.z)
            elif attribute.id == kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
                programmatic = bool(attribute.value.programmaticStreamSerializationAllowed)
            else:
                raise AssertionError(attribute.id)
        self.launches.append(
            Launched(
                self.stack[-1], int(kernel), grid, block, config.sharedMemBytes, stream,
                tuple(values), cluster, programmatic,
            )
        )  # fmt: skip
        return (OK,)

    # Errors

    def cuGetErrorName(self, status: Any) -> Any:
        return OK, status.name.encode()

    def cuGetErrorString(self, status: Any) -> Any:
        return OK, b"as the test wanted"


class Library:
    """Stands for the driver's library as ctypes opens it: pointers instead of objects."""

    def __init__(self, driver: FakeDriver) -> None:
        def launch(*pointers: Any) -> int:
            *given_pointers, extra = pointers
            assert extra is None
            config, kernel, parameters = [ctypes.addressof(one._obj) for one in given_pointers]
            # Of a copy: the binding's object writes to it, and threads may share what is given.
            copied = LaunchConfig.from_buffer_copy(LaunchConfig.from_address(config))
            given = real.CUlaunchConfig(_ptr=ctypes.addressof(copied))
            if copied.count:  # the object that is made of an address has no list of them
                size = 72  # of a CUlaunchAttribute
                given.attrs = [
                    real.CUlaunchAttribute(_ptr=copied.attributes + size * i)
                    for i in range(copied.count)
                ]
            return int(driver.cuLaunchKernelEx(given, kernel, parameters, 0)[0])

        def current(place: Any) -> int:
            status, device = driver.cuCtxGetDevice()
            if status == OK:
                place._obj.value = device
            return int(status)

        self.cuLaunchKernelEx, self.cuCtxGetDevice = launch, current
