"""Ready epilogues: each function makes an :class:`nvfp4.Epilogue` for a product.

The functions that run per element are plain Python over float32, written so that the golden model,
the simulated machine and the compiler read them alike: one operation, one rounding, and NaN passes
through every comparison.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .arrays import as_array
from .epilogue import Epilogue

__all__ = ["bias", "relu2", "residual_add", "row_scale", "swiglu"]


def bias(bias: Any) -> Epilogue:
    """Add a bias by column: ``value + bias[column]``, or ``value + bias[expert, column]``.

    Parameters
    ----------
    bias : array of float32, [N] or [E, N]

    Returns
    -------
    Epilogue

    Raises
    ------
    TypeError
        `bias` is not an array.
    ValueError
        `bias` has neither one axis nor two.
    """
    shape = as_array(bias, "bias").shape
    if len(shape) not in (1, 2):
        raise ValueError(f"bias must have shape [N] or [E, N]; got {shape}")
    if len(shape) == 1:
        return Epilogue(_add_bias, bias, axes=("N",))
    columns = shape[1]

    def add_expert_bias(value, row, column, expert, bias):  # type: ignore[no-untyped-def]
        return value + np.float32(bias[expert * columns + column])

    return Epilogue(add_expert_bias, bias, axes=("EN",))


def row_scale(scale: Any) -> Epilogue:
    """Multiply each row by its own factor, such as a router's weight: ``value * scale[row]``.

    Parameters
    ----------
    scale : array of float32, [M] or [M, 1]

    Returns
    -------
    Epilogue

    Raises
    ------
    TypeError
        `scale` is not an array.
    ValueError
        `scale` has another shape.
    """
    shape = as_array(scale, "scale").shape
    if len(shape) != 1 and not (len(shape) == 2 and shape[1] == 1):
        raise ValueError(f"scale must have shape [M] or [M, 1]; got {shape}")
    return Epilogue(_scale_row, scale, axes=("M1"[: len(shape)],))


def residual_add(residual: Any) -> Epilogue:
    """Add an array of the shape of the result: ``value + residual[row, column]``, before the cast.

    Parameters
    ----------
    residual : array of float32, [M, N]

    Returns
    -------
    Epilogue

    Raises
    ------
    TypeError
        `residual` is not an array.
    ValueError
        `residual` does not have two axes.
    """
    shape = as_array(residual, "residual").shape
    if len(shape) != 2:
        raise ValueError(f"residual must have the shape of the result, [M, N]; got {shape}")
    columns = shape[1]

    def add_residual(value, row, column, expert, residual):  # type: ignore[no-untyped-def]
        return value + np.float32(residual[row * columns + column])

    return Epilogue(add_residual, residual, axes=("MN",))


def relu2() -> Epilogue:
    """Squared ReLU: ``max(value, 0)**2``, NaN kept.

    Returns
    -------
    Epilogue
    """
    return Epilogue(_relu2)


def swiglu(
    alpha: float = 1.0, beta: float = 0.0, limit: float | None = None, halves: bool = True
) -> Epilogue:
    """Gated SiLU of pairs of columns: ``gate * sigmoid(alpha * gate) * (up + beta)``, N/2 columns.

    With a limit, ``gate`` is first bounded from above by it, and ``up`` to -limit ... limit. The
    defaults are SwiGLU; gpt-oss is ``swiglu(1.702, 1.0, 7.0, halves=False)``.

    Parameters
    ----------
    alpha, beta : float
    limit : float, optional
        None: no bound.
    halves : bool
        Gates in the first half of the columns (True), or in the even ones, each beside its up
        (False).

    Returns
    -------
    Epilogue

    Raises
    ------
    ValueError
        A `limit` that is not greater than 0.
    """
    if limit is not None and not limit > 0:
        raise ValueError(f"limit must be None or greater than 0; got {limit}")
    steepness, shift = np.float32(alpha), np.float32(beta)
    bound = np.float32(np.inf if limit is None else limit)

    def gated_silu(gate, up, row, column, expert):  # type: ignore[no-untyped-def]
        if gate > bound:
            gate = bound
        if up > bound:
            up = bound
        if up < -bound:
            up = -bound
        return gate * _sigmoid(steepness * gate) * (up + shift)  # type: ignore[no-untyped-call]

    return Epilogue(gated_silu, pair=True, halves=halves)


def _add_bias(value, row, column, expert, bias):  # type: ignore[no-untyped-def]
    return value + np.float32(bias[column])


def _scale_row(value, row, column, expert, scale):  # type: ignore[no-untyped-def]
    return value * np.float32(scale[row])


def _relu2(value, row, column, expert):  # type: ignore[no-untyped-def]
    if value < np.float32(0):
        return np.float32(0)
    return value * value


def _sigmoid(value):  # type: ignore[no-untyped-def]
    # The exponent is never positive, so that nothing overflows on the way to 0 and 1.
    power = np.float32(math.exp(-abs(value)))
    one = np.float32(1)
    if value < 0:
        return power / (one + power)
    return one / (one + power)
