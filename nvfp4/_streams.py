"""The stream of a call: the one given, else the current one of the first array's library."""

from __future__ import annotations

import operator
import sys
from typing import Any

__all__ = ["dlpack_stream", "given_stream", "stream_handle"]


def given_stream(stream: Any) -> int:
    """Handle of a stream that the caller passed.

    Raises
    ------
    TypeError
        Neither an int nor an object with ``__cuda_stream__``.
    ValueError
        A negative int.
    """
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        # A method by the protocol; an attribute in its first edition.
        return int((protocol() if callable(protocol) else protocol)[1])
    for attribute in ("cuda_stream", "ptr"):  # PyTorch's and CuPy's streams of before the protocol
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return handle
    try:
        if isinstance(stream, bool):
            raise TypeError
        handle = operator.index(stream)
    except TypeError:
        raise TypeError(
            "stream must be None (the current stream of the arrays' library), an int, or an "
            f"object with __cuda_stream__; got {type(stream).__name__}"
        ) from None
    if handle < 0:
        raise ValueError(f"stream must be a stream handle, which is not negative; got {handle}")
    return handle


def stream_handle(owner: Any, library: str, device: int | None, stream: Any) -> int:
    """Handle of the stream for a call whose first array is `owner`, of `library` on `device`."""
    if stream is not None:
        return given_stream(stream)
    if device is None:
        return 0
    if library == "torch":
        return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)
    if library == "cupy":
        return int(sys.modules["cupy"].cuda.get_current_stream(device).ptr)
    interface = getattr(owner, "__cuda_array_interface__", None) if library != "jax" else None
    if interface is not None:
        # The stream that the array's data is ready on; none stated is the default stream.
        return int(interface.get("stream") or 0)
    return _pool_stream()


def _pool_stream() -> int:
    """CuPy's current stream, where it makes the results of other libraries; else the default."""
    cupy = sys.modules.get("cupy")
    return int(cupy.cuda.get_current_stream().ptr) if cupy is not None else 0


def dlpack_stream(stream: Any) -> int:
    """What ``__dlpack__(stream=...)`` is told: its legacy default stream is 1, and 0 is illegal."""
    return (_pool_stream() if stream is None else given_stream(stream)) or 1
