"""Reading GGUF files with MXFP4 or NVFP4 tensors, through the ``gguf`` package.

GGUF keeps the scales of some blocks and their codes together, and pairs column j with column
j + V/2 in a byte. Here both become codes and scales in this package's order, row by row. A tensor
``<name>.scale`` beside ``<name>.weight`` holds its tensor scale, a multiplier.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ToolchainError
from ..formats import MXFP4, NVFP4
from .container import Entry
from .errors import CheckpointError, printable
from .model import Checkpoint
from .schemes import Found, Scheme, StoredWeight

__all__ = ["GgufCheckpoint"]

_PLAIN = {"F32": "F32", "F16": "F16", "BF16": "BF16", "F64": "F64", "I8": "I8", "I16": "I16",
          "I32": "I32", "I64": "I64"}  # fmt: skip
_SCHEMES = {
    "MXFP4": Scheme("gguf", MXFP4, "MXFP4", ".weight", "U8", "", "U8", write=False),
    "NVFP4": Scheme(
        "gguf", NVFP4, "NVFP4", ".weight", "U8", "", "U8", ".scale", ".input_scale", write=False
    ),
}


class GgufCheckpoint(Checkpoint):
    """A GGUF file, as far as its tensors go: names are kept, metadata are not.

    Raises
    ------
    ToolchainError
        The ``gguf`` package is missing.
    CheckpointError
        It is no GGUF file, or holds tensors in other quantised types.
    """

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise ToolchainError(
                "reading .gguf needs the package gguf: install nvfp4[checkpoint]"
            ) from error
        if not path.is_file():
            raise FileNotFoundError(2, "No such file or directory", str(path))
        self.path = path
        self.config = self.modelopt_config = None
        self.files, self.file_of, self.entries = {}, {}, {}
        self._tensors: dict[str, Any] = {}
        found = Found()
        try:
            reader = GGUFReader(path)
        except Exception as error:
            raise CheckpointError(f"{printable(path)} is not a GGUF file: {error}") from error
        unknown = []
        for tensor in reader.tensors:
            name, kind = tensor.name, tensor.tensor_type.name
            shape = tuple(int(n) for n in reversed(tensor.shape))
            self._tensors[name] = tensor.data
            if kind in _PLAIN:
                self.entries[name] = Entry(_PLAIN[kind], shape, 0, int(tensor.n_bytes))
                self.file_of[name] = path.name
            elif kind in _SCHEMES and name.endswith(".weight"):
                module = name.removesuffix(".weight")
                found.weights[module] = StoredWeight(module, _SCHEMES[kind], {"codes": name}, shape)
            else:
                unknown.append(f"{printable(name)} ({kind})")
        if unknown:
            raise CheckpointError(
                f"{printable(path)}: only MXFP4, NVFP4 and unquantised tensors are read; "
                f"{len(unknown)} are of another type, first {unknown[0]}"
            )
        for module, weight in found.weights.items():
            for role, suffix in (("tensor_scale", ".scale"), ("input_scale", ".input_scale")):
                entry = self.entries.get(module + suffix)
                if weight.scheme.tensor_scale and entry is not None:
                    if math.prod(entry.shape) not in (1, math.prod(weight.shape[:-2])):
                        raise CheckpointError(
                            f"{printable(path)}: {printable(module)}{suffix} has shape "
                            f"{list(entry.shape)}"
                        )
                    weight.parts[role] = module + suffix
        taken = {n for w in found.weights.values() for n in w.names}
        found.plain = [name for name in self.entries if name not in taken]
        self._found = found

    @property
    def convention(self) -> str | None:
        """No configuration names one."""
        return None

    def raw(self, name: str) -> np.ndarray:
        """The bytes of a tensor, a view: uint8, [nbytes]."""
        return np.asarray(self._tensors[name]).reshape(-1).view(np.uint8)

    def array(self, name: str) -> np.ndarray:
        """An unquantised tensor as an array, a view of the file."""
        from .container import numpy_dtype

        entry = self.entries[name]
        dtype = numpy_dtype(entry.dtype)
        if dtype is None:
            raise TypeError(f"{name!r} has no NumPy type")
        return self.raw(name).view(dtype).reshape(entry.shape)

    def release(self, name: str) -> None:
        """Nothing: the package's reader keeps its map."""

    def release_part(self, name: str, start: int, stop: int) -> None:
        """Nothing, as `release`."""

    def _blocks(self, weight: StoredWeight, start: int, stop: int) -> np.ndarray:
        """Some rows as blocks of scale bytes and codes: uint8, [rows, blocks, bytes]."""
        raw = self.raw(weight.parts["codes"])
        width = raw.size // weight.rows
        size = 17 if weight.scheme.format is MXFP4 else 36
        return raw[start * width : stop * width].reshape(stop - start, -1, size)

    def codes(self, weight: StoredWeight, start: int, stop: int) -> np.ndarray:
        """Codes of some rows: uint8, [stop - start, K/2], low nibble = even column."""
        blocks = self._blocks(weight, start, stop)
        half = weight.scheme.format.block // 2
        packed = blocks[..., 1 if half == 16 else 4 :].reshape(stop - start, -1, half)
        columns = np.concatenate([packed & 0x0F, packed >> 4], axis=-1)
        return (columns[..., 0::2] | (columns[..., 1::2] << 4)).reshape(stop - start, -1)

    def scales(self, weight: StoredWeight, start: int, stop: int) -> np.ndarray:
        """Scale bytes of some rows: uint8, [stop - start, K/V]."""
        blocks = self._blocks(weight, start, stop)
        count = 1 if weight.scheme.format is MXFP4 else 4
        return np.ascontiguousarray(blocks[..., :count]).reshape(stop - start, -1)
