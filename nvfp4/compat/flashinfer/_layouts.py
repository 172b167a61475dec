"""The three layouts of block scales that FlashInfer knows, as arrays of its shapes."""

from __future__ import annotations

from enum import Enum
from typing import Any

from ... import arrays
from ...api import _flashinfer as device
from ...formats import FORMATS
from ...layouts import TILE_BLOCKS, TILE_ROWS, scale_k_tiles, scale_tiles
from ...layouts_flashinfer import SMALL_TILE_ROWS
from ...tensor import QTensor

__all__ = ["SfLayout", "from_linear", "layout_of", "scale_extent", "to_tensor"]


class SfLayout(Enum):
    """Layout of block scales, as FlashInfer numbers them."""

    layout_128x4 = 0
    layout_8x4 = 1
    layout_linear = 2


def layout_of(name: str, value: Any) -> SfLayout:
    """One of ours, or FlashInfer's own object of the same name and number.

    Raises
    ------
    ValueError
        It is neither.
    """
    if isinstance(value, SfLayout):
        return value
    for layout in SfLayout:
        if (getattr(value, "name", None), getattr(value, "value", None)) == (
            layout.name,
            layout.value,
        ):
            return layout
    raise ValueError(f"{name} must be one of {', '.join(map(str, SfLayout))}, but got {value!r}")


def scale_extent(layout: SfLayout, rows: int, blocks: int) -> tuple[int, int]:
    """Rows and columns of the scales of a matrix, with their padding."""
    if layout is SfLayout.layout_linear:
        return rows, blocks
    tile = TILE_ROWS if layout is SfLayout.layout_128x4 else SMALL_TILE_ROWS
    return -(-rows // tile) * tile, scale_k_tiles(blocks) * TILE_BLOCKS


def from_linear(q: QTensor, layout: SfLayout) -> Any:
    """Scales of a quantised matrix, flat; those of `q` are tcgen for 128x4, else linear."""
    scales = q.scales
    if layout is SfLayout.layout_8x4:
        scales = device.swizzled("scales", arrays.as_array(scales, "scales"), SMALL_TILE_ROWS)
    return scales.reshape((-1,))


def to_tensor(
    codes: Any,
    scales: Any,
    format: str,
    shape: tuple[int, int],
    layout: SfLayout,
    decode_scale: Any = None,
    *,
    name: str,
) -> QTensor:
    """A QTensor of a matrix over codes and contiguous scales of any shape that holds their bytes.

    Raises
    ------
    ValueError
        Another number of scales than the layout has; `name` is their argument.
    """
    blocks = shape[1] // FORMATS[format].block
    down, across = scale_extent(layout, shape[0], blocks)
    array = arrays.as_array(scales, name)
    if array.size != down * across:
        raise ValueError(
            f"{name} must have {down * across} bytes for {shape[0]} rows of {blocks} blocks in "
            f"{layout.name}, but got shape {array.shape}"
        )
    kind = "linear"
    if layout is SfLayout.layout_128x4:
        kind = "tcgen"
        scales = scales.reshape((scale_tiles(shape[0]), scale_k_tiles(blocks), 32, 4, 4))
    elif layout is SfLayout.layout_8x4:
        scales = device.unswizzled(name, array, (shape[0], blocks))
    else:
        scales = scales.reshape((shape[0], blocks))
    return QTensor.from_parts(
        codes, scales, format, shape=shape, decode_scale=decode_scale, scale_layout=kind
    )
