"""What is done to one tensor on its way into an output file.

A step is plain data (it travels to other machines), says which tensors it writes before any byte is
read, and then reads its source a piece at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..formats import BlockFormat
from .errors import CheckpointError, printable
from .model import Checkpoint, row_ranges
from .nonfinite import NonFinite, count_nonfinite
from .numeric import CHUNK, CpuBackend, GpuBackend, encode_scale_of
from .schemes import Scheme
from .search import quantize_mse, search_encode_scale
from .writer import TensorWriter

__all__ = ["Context", "ConvertStep", "CopyStep", "QuantizeStep", "Step"]

_COPY_BYTES = 1 << 23
_FLT_MIN = 2.0**-126
Outputs = dict[str, tuple[str, tuple[int, ...]]]


@dataclass
class Context:
    """Where a step reads, writes, computes, and reports the source bytes that are done.

    ``nonfinite`` gets what the user is to be told of: by tensor, where there is NaN or infinity.
    """

    model: Checkpoint
    writer: TensorWriter
    backend: CpuBackend | GpuBackend
    done: Callable[[int], None]
    nonfinite: dict[str, NonFinite] = field(default_factory=dict)


@dataclass(frozen=True)
class CopyStep:
    """A tensor as it is, byte for byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    def outputs(self) -> Outputs:
        """Name -> (dtype, shape) of what the step writes."""
        return {self.name: (self.dtype, self.shape)}

    def run(self, context: Context) -> None:
        """Copy the bytes."""
        raw = context.model.raw(self.name)
        for start in range(0, raw.size, _COPY_BYTES):
            piece = raw[start : start + _COPY_BYTES]
            context.writer.append(self.name, piece)
            context.done(piece.size)
            context.model.release_part(self.name, start, start + piece.size)
        del raw
        context.model.release(self.name)


@dataclass(frozen=True)
class QuantizeStep:
    """A dense weight, quantised.

    Attributes
    ----------
    name : str
        The dense tensor.
    module : str
        Prefix of what is written.
    scheme : Scheme
    shape : tuple of int
        Logical shape [..., K] of what is written.
    nbytes : int
        Of the source.
    rounding, method : str
    transposed : bool
        The source is [..., K, N].
    shares : tuple of str
        Tensors whose largest magnitude counts too: they get the same tensor scale.
    input_amax : float or None
        Largest magnitude of the activations, where it is known.
    """

    name: str
    module: str
    scheme: Scheme
    shape: tuple[int, ...]
    nbytes: int
    rounding: str = "rceil"
    method: str = "amax"
    transposed: bool = False
    shares: tuple[str, ...] = ()
    input_amax: float | None = None

    def outputs(self) -> Outputs:
        """Name -> (dtype, shape) of what the step writes."""
        return {n: (d, s) for n, d, s in self._roles().values()}

    def _roles(self) -> dict[str, tuple[str, str, tuple[int, ...]]]:
        return self.scheme.outputs(self.module, self.shape, with_input=self.input_amax is not None)

    def run(self, context: Context) -> None:
        """Quantise matrix by matrix, a piece of rows at a time."""
        roles = self._roles()
        fmt = self.scheme.format
        rows, columns = self.shape[-2:]
        matrices = math.prod(self.shape[:-2])
        source = context.model.array(self.name)
        stack = source.reshape(matrices, *source.shape[-2:])
        tensor_scales = []
        nan_blocks = infinite = 0
        for index in range(matrices):
            matrix = stack[index].T if self.transposed else stack[index]
            g = None
            if fmt.scale == "e4m3":
                g = self._encode_scale(context, matrix, index, fmt)
                tensor_scales.append(g)
            chunk = context.backend.chunk if self.method == "amax" else CHUNK
            for start, stop in row_ranges(rows, columns, chunk):
                x = matrix[start:stop]
                if self.method == "mse":
                    codes, scales, _ = quantize_mse(x, fmt, g)
                else:
                    codes, scales = context.backend.quantize(x, fmt, g, self.rounding)
                context.writer.append(roles["codes"][0], codes)
                context.writer.append(roles["scales"][0], scales)
                # NaN or infinity in an nvfp4 matrix makes its encode scale 1.
                if g is None or g == 1:
                    here = count_nonfinite(x, scales, fmt)
                    nan_blocks, infinite = nan_blocks + here[0], infinite + here[1]
                context.done(x.nbytes)
                if not self.transposed:
                    first = (index * rows + start) * columns * x.itemsize
                    context.model.release_part(self.name, first, first + x.nbytes)
            del matrix
            _release_matrix(context.model, self.name, index, matrices)
        del source, stack
        context.model.release(self.name)
        if nan_blocks or infinite:
            context.nonfinite[self.name] = {"nan_blocks": nan_blocks, "infinite": infinite}
        if "tensor_scale" in roles:
            self._write_scale(context, roles["tensor_scale"][0], tensor_scales)
        if "input_scale" in roles:
            self._write_scale(context, roles["input_scale"][0], [encode_scale_of(self.input_amax)])

    def _encode_scale(
        self, context: Context, matrix: np.ndarray, index: int, fmt: BlockFormat
    ) -> np.float32:
        model, amax_of = context.model, context.backend.amax
        amax = amax_of(matrix)
        for name in self.shares:
            other = model.array(name)
            part = other.reshape(-1, *other.shape[-2:])[index]
            amax = np.maximum(amax, amax_of(part))
            del other, part
            model.release(name)
        if self.method == "mse" and 0 < amax < np.inf and not self.shares:
            return search_encode_scale(matrix, fmt, np.float32(amax))
        return encode_scale_of(amax)

    def _write_scale(self, context: Context, name: str, encode: list[np.float32]) -> None:
        values = np.array(encode, np.float32)
        if not self.scheme.divides:
            values = np.float32(1) / values
        if not ((values >= _FLT_MIN) & np.isfinite(values)).all():
            raise CheckpointError(
                f"{printable(self.name)}: its magnitudes are beyond what a tensor scale in "
                f"float32 can express (encode scale {encode[0]!s})"
            )
        context.writer.append(name, values)


def _release_matrix(model: Checkpoint, name: str, index: int, matrices: int) -> None:
    if matrices > 1:
        file = model.files[model.file_of[name]]
        entry = file.entries[name]
        size = entry.nbytes // matrices
        file.release_range(entry.start + index * size, entry.start + (index + 1) * size)


@dataclass(frozen=True)
class ConvertStep:
    """A quantised weight, written by another scheme: the same codes and block scales."""

    module: str
    target: Scheme
    target_module: str
    shape: tuple[int, ...]
    nbytes: int
    with_input: bool

    def outputs(self) -> Outputs:
        """Name -> (dtype, shape) of what the step writes."""
        return {n: (d, s) for n, d, s in self._roles().values()}

    def _roles(self) -> dict[str, tuple[str, str, tuple[int, ...]]]:
        return self.target.outputs(self.target_module, self.shape, with_input=self.with_input)

    def run(self, context: Context) -> None:
        """Copy codes and scales; invert the tensor scale where the conventions differ in it."""
        model, roles = context.model, self._roles()
        weight = model.found.weights[self.module]
        fmt, (rows, columns) = self.target.format, (weight.rows, self.shape[-1])
        for start, stop in row_ranges(rows, columns, CHUNK):
            codes, scales = model.codes(weight, start, stop), model.scales(weight, start, stop)
            if fmt.scale == "e4m3" and (scales & 0x80).any():
                raise CheckpointError(
                    f"{printable(self.module)}: a block scale of {fmt.name} is negative"
                )
            context.writer.append(roles["codes"][0], codes)
            context.writer.append(roles["scales"][0], scales)
            context.done(codes.nbytes + scales.nbytes)
            del codes, scales
        for role in ("tensor_scale", "input_scale"):
            if role not in roles:
                continue
            values = model.stored_scale(weight, role)
            if values is None:  # a source whose weights need none: the scale 1
                values = np.ones(1, np.float32)
            if weight.scheme.divides != self.target.divides:
                values = np.float32(1) / values
                if not ((values >= _FLT_MIN) & np.isfinite(values)).all():
                    raise CheckpointError(
                        f"{printable(weight.parts[role])}: its reciprocal is no normal float32"
                    )
            count = math.prod(roles[role][2])
            context.writer.append(roles[role][0], np.broadcast_to(values, (count,)).copy())
        model.release_weight(weight)


Step = CopyStep | QuantizeStep | ConvertStep
