"""The CUDA driver, as far as launching needs it: devices, contexts, loaded kernels.

``cuda.bindings.driver`` is imported and the driver initialised on the first call, never on import:
a machine without a GPU imports this module. A kernel is loaded once in a process, whatever the
number of its devices (``CUlibrary``), and launched in the context that is current; a device that is
not current gets its primary context, the one that CuPy and PyTorch use, for the moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from .architectures import arch_of
from .errors import ToolchainError

if TYPE_CHECKING:
    from .cubin import Binary

__all__ = [
    "DeviceInfo",
    "LaunchConfig",
    "LaunchFunction",
    "LoadedKernel",
    "check",
    "count_devices",
    "current_device",
    "current_ordinal",
    "device_info",
    "driver",
    "is_capturing",
    "load",
    "on_device",
    "reserve_shared",
    "uncaptured",
]

#: Dynamic shared memory that a kernel may use without asking for more.
_SHARED_WITHOUT_ASKING = 48 * 1024
_loading = threading.RLock()


@functools.cache
def driver() -> Any:
    """``cuda.bindings.driver``, initialised.

    Raises
    ------
    ToolchainError
        cuda-bindings or the driver is missing, or there is no GPU.
    """
    try:
        from cuda.bindings import driver as module
    except ImportError as error:
        raise ToolchainError(
            "launching a kernel needs cuda-bindings; install it with: pip install 'nvfp4[cuda13]'"
        ) from error
    try:
        (status,) = module.cuInit(0)
    except RuntimeError as error:
        raise ToolchainError(
            "launching a kernel needs NVIDIA's driver (libcuda), which was not found; without a GPU"
            " pass NumPy arrays, or use `with nvfp4.simulate():`"
        ) from error
    if status != 0:
        raise ToolchainError(
            f"the CUDA driver does not start ({_name(module, status)}): is there a GPU, and may "
            "this process use it?"
        )
    return module


def _name(module: Any, status: Any) -> str:
    code, text = module.cuGetErrorName(status)
    return text.decode() if code == 0 and text else f"CUDA error {int(status)}"


def check(result: tuple[Any, ...], what: str) -> Any:
    """The values of a driver call; raises RuntimeError, which says `what` failed and why."""
    status, *values = result
    if status != 0:
        module = driver()
        code, text = module.cuGetErrorString(status)
        reason = text.decode() if code == 0 and text else "no description"
        raise RuntimeError(f"{what} failed: {_name(module, status)} ({reason})")
    return values[0] if len(values) == 1 else tuple(values)


# --- devices --------------------------------------------------------------------------------------


class DeviceInfo(NamedTuple):
    """What plans and launches need to know of one GPU.

    Attributes
    ----------
    ordinal
        Its number in this process.
    name
        ``"NVIDIA H200"``.
    cc
        Compute capability.
    processors
        Number of multiprocessors.
    shared_bytes
        Most dynamic shared memory of a block.
    context
        Handle of its primary context.
    """

    ordinal: int
    name: str
    cc: tuple[int, int]
    processors: int
    shared_bytes: int
    context: Any

    @property
    def arch(self) -> str:
        """The target to build for; UnsupportedError where there is none."""
        return arch_of(self.cc)


def count_devices() -> int:
    """How many GPUs this process sees."""
    return int(check(driver().cuDeviceGetCount(), "counting devices"))


@functools.cache
def device_info(ordinal: int) -> DeviceInfo:
    """Describe a GPU, and retain its primary context for the life of the process.

    Raises
    ------
    ValueError
        There is no such device.
    """
    cuda, count = driver(), count_devices()
    if not 0 <= ordinal < count:
        raise ValueError(f"device must be below {count}, the number of GPUs; got {ordinal}")
    device = check(cuda.cuDeviceGet(ordinal), f"finding device {ordinal}")
    kinds = cuda.CUdevice_attribute

    def attribute(name: str) -> int:
        kind = getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(cuda.cuDeviceGetAttribute(kind, device), f"asking device {ordinal}"))

    return DeviceInfo(
        ordinal,
        _text(check(cuda.cuDeviceGetName(128, device), f"asking device {ordinal}")),
        (attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        attribute("MULTIPROCESSOR_COUNT"),
        attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        check(cuda.cuDevicePrimaryCtxRetain(device), f"opening device {ordinal}"),
    )


class _Asking:
    """How a thread asks for its current device, and where the answer is written."""

    __slots__ = ("answer", "ask", "binding", "place")

    def __init__(self, binding: Any) -> None:
        library = _library(binding)
        self.binding = binding
        self.ask = None if library is None else library.cuCtxGetDevice
        self.answer = ctypes.c_int()
        self.place = ctypes.byref(self.answer)


class _Here(threading.local):
    asking: _Asking | None = None


_here = _Here()


def current_ordinal() -> int:
    """Ordinal of the device whose context is current in this thread; -1: there is none yet."""
    asking, binding = _here.asking, driver()
    if asking is None or asking.binding is not binding:
        asking = _here.asking = _Asking(binding)
    if asking.ask is None:
        status, device = binding.cuCtxGetDevice()
        return int(device) if status == 0 else -1
    return asking.answer.value if asking.ask(asking.place) == 0 else -1


def current_device() -> int:
    """Ordinal of the device whose context is current in this thread; 0 where there is none yet."""
    return max(current_ordinal(), 0)


@contextlib.contextmanager
def on_device(ordinal: int) -> Iterator[None]:
    """Make a device's primary context current, unless one of its contexts is; then restore."""
    if current_ordinal() == ordinal:
        yield
        return
    cuda = driver()
    check(cuda.cuCtxPushCurrent(device_info(ordinal).context), f"switching to device {ordinal}")
    try:
        yield
    finally:
        check(cuda.cuCtxPopCurrent(), f"switching back from device {ordinal}")


def is_capturing(stream: int) -> bool:
    """Whether work given to a stream is now recorded into a graph; its device must be current.

    The legacy default stream cannot be captured, but says so of any stream that it waits for.
    """
    cuda = driver()
    status, state = cuda.cuStreamIsCapturing(cuda.CUstream(stream))
    if status == cuda.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
        return True
    check((status,), "asking whether a stream is being captured")
    return bool(state != cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)


# --- kernels --------------------------------------------------------------------------------------


class LoadedKernel:
    """A kernel in the driver's hands.

    Attributes
    ----------
    binary
        Where it came from.
    handle
        A ``CUfunction``, in fact a context-free ``CUkernel``.
    """

    __slots__ = ("_kernel", "_library", "_ready", "binary", "handle")

    def __init__(self, binary: Binary, handle: Any, kernel: Any, library: Any) -> None:
        self.binary = binary
        self.handle = handle
        self._kernel = kernel
        self._library = library
        #: Device -> dynamic shared memory that a launch may ask for there.
        self._ready: dict[int, int] = {}


def load(binary: Binary) -> LoadedKernel:
    """Give machine code to the driver; a device of its architecture must be current.

    Raises
    ------
    ToolchainError
        The driver refuses the code.
    """
    cuda = driver()
    with _loading, uncaptured(cuda):
        status, library = cuda.cuLibraryLoadData(binary.cubin, [], [], 0, [], [], 0)
        if status != 0:
            raise ToolchainError(
                f"the driver refuses the machine code of {binary.label} for {binary.arch} "
                f"({_name(cuda, status)}), which was built by {dict(binary.compilers)}: "
                "a newer driver is needed, or older compilers"
            )
        entry = binary.entry.encode()
        kernel = check(cuda.cuLibraryGetKernel(library, entry), f"finding {binary.label}")
    return LoadedKernel(binary, cuda.CUfunction(int(kernel)), kernel, library)


def reserve_shared(loaded: LoadedKernel, ordinal: int, shared_bytes: int) -> None:
    """Make a loaded kernel launchable on the current device with that much dynamic shared memory.

    Raises
    ------
    ValueError
        The device has less.
    """
    cuda, info, binary = driver(), device_info(ordinal), loaded.binary
    total = shared_bytes + binary.shared_bytes
    if total > info.shared_bytes:
        raise ValueError(
            f"{binary.label} needs {total} bytes of shared memory a block; device {ordinal} "
            f"({info.name}) has {info.shared_bytes}"
        )
    with _loading:
        known = loaded._ready.get(ordinal)
        if known is not None and known >= shared_bytes:
            return
        with uncaptured(cuda):
            # Load it into this context now: later it could meet a capture, or cost a launch.
            check(cuda.cuKernelGetFunction(loaded._kernel), f"loading {binary.label}")
            if total > _SHARED_WITHOUT_ASKING:
                kind = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                device = check(cuda.cuDeviceGet(ordinal), f"finding device {ordinal}")
                check(
                    cuda.cuKernelSetAttribute(kind, shared_bytes, loaded._kernel, device),
                    f"reserving {shared_bytes} bytes of shared memory for {binary.label}",
                )
        # Only ever raised: a launch with more may be prepared already.
        loaded._ready[ordinal] = shared_bytes


@contextlib.contextmanager
def uncaptured(cuda: Any) -> Iterator[None]:
    """Let this thread load code though a stream is being captured, without breaking the capture."""
    mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = check(cuda.cuThreadExchangeStreamCaptureMode(mode), "changing the capture mode")
    try:
        yield
    finally:
        check(cuda.cuThreadExchangeStreamCaptureMode(before), "changing the capture mode back")


def _library(binding: Any) -> Any:
    """The driver's own library, where it is found: its calls cost half of what the binding's do."""
    return _open_library() if isinstance(binding, ModuleType) else None  # None: a test's driver


@functools.cache
def _open_library() -> Any:
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        library = ctypes.CDLL(name)
        library.cuLaunchKernelEx  # noqa: B018 - whether it is there
        # A thread's own variable, which is there at once: giving up the interpreter's lock for it
        # costs more than the call, and may cost a turn of another thread.
        library.cuCtxGetDevice = ctypes.PyDLL(name).cuCtxGetDevice  # type: ignore[attr-defined]
    except (OSError, AttributeError):
        return None
    return library


class LaunchFunction:
    """``cuLaunchKernelEx``: from the driver's library where it is found, else the binding's.

    The binding's own call takes 8 us of host time on an H200's host, the library's 4.

    Attributes
    ----------
    call
        Takes what `arguments` gives, and returns the status as an int.
    direct
        Whether it is the library's, which is given pointers and not the binding's objects.
    ask
        ``cuCtxGetDevice``: takes what ``ctypes.byref`` makes of a ``c_int``, and returns the
        status.
    """

    def __init__(self) -> None:
        binding = driver()
        library = _library(binding)
        self.direct = library is not None
        self.call: Callable[..., int]
        self.ask: Callable[[Any], int]
        if library is not None:
            self.call, self.ask = library.cuLaunchKernelEx, library.cuCtxGetDevice
            return

        def ask(place: Any) -> int:
            status, device = binding.cuCtxGetDevice()
            if status == 0:
                place._obj.value = int(device)
            return int(status)

        self.call, self.ask = lambda *arguments: int(binding.cuLaunchKernelEx(*arguments)[0]), ask

    def arguments(self, config: Any, kernel: Any, parameters: int) -> tuple[Any, ...]:
        """Of a configuration, a kernel and the address of its parameters' addresses."""
        if self.direct:
            # Pointers ready to be passed: numbers would be made into such by each call.
            return *map(_pointer, (int(config.getPtr()), int(kernel), parameters)), None
        return config, kernel, parameters, 0


def _pointer(address: int) -> Any:
    return ctypes.byref(ctypes.c_char.from_address(address))


class LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig`` as it lies in memory: storing a stream takes 50 ns, not a microsecond."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_uint64),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


def _text(padded: bytes) -> str:
    """What stands before the first zero byte."""
    return padded.partition(b"\0")[0].decode().strip()
