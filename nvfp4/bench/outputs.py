"""What quantisers write when they are measured."""

from __future__ import annotations

from typing import Any

from ..formats import BlockFormat
from ..layouts import allocated_tiles, codes_shape, scale_k_tiles, scale_shape
from ..tensor import QTensor
from .devices import Device

__all__ = ["outputs"]


def outputs(
    device: Device,
    fmt: BlockFormat,
    rows: int,
    columns: int,
    count: int,
    offsets: Any = None,
    *,
    row_scales: bool = False,
) -> list[QTensor]:
    """QTensors to be written, full of poison; their arrays lie in a few large ones.

    Parameters
    ----------
    offsets
        Of ranges that start on tiles of their own.
    row_scales
        Whether each row has a decode scale, not each range or the matrix.
    """
    shape = (rows, columns)
    scales = scale_shape(fmt, shape, "tcgen")
    decode: tuple[int, ...] = (rows, 1) if row_scales else ()
    if offsets is not None:
        groups = offsets.shape[0] - 1
        scales = (allocated_tiles(rows, groups), scale_k_tiles(columns // fmt.block), 32, 4, 4)
        decode = (groups,)
    all_codes = device.full((count, *codes_shape(fmt, shape)), 0xAA, "uint8")
    all_scales = device.full((count, *scales), 0xAA, "uint8")
    all_decode = device.full((count, *decode), 1.0, "float32")
    # [i : i + 1] and reshape: CuPy, PyTorch and NumPy alike give an array even of shape ().
    return [
        QTensor.from_parts(
            all_codes[i],
            all_scales[i],
            fmt,
            shape=shape,
            decode_scale=all_decode[i : i + 1].reshape(decode),
            groups=offsets,
        )
        for i in range(count)
    ]
