"""A checkpoint as a whole: one safetensors file, or a folder of them with their index.

A folder is trusted in nothing: file names of the index must be plain names in the folder, and index
and files must agree on every tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from .container import Entry, TensorFile
from .errors import CheckpointError, printable
from .schemes import Found, StoredWeight, find_weights

if TYPE_CHECKING:
    from ..tensor import QTensor

__all__ = ["INDEX", "Checkpoint", "open_checkpoint", "row_ranges"]

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
MODELOPT_CONFIG = "hf_quant_config.json"
_JSON_LIMIT = 200_000_000
_FLT_MIN = np.float32(2.0**-126)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a .safetensors file, a folder with such files, or a .gguf file.

    Parameters
    ----------
    path : str or path

    Returns
    -------
    Checkpoint
        A context manager; closing it unmaps the files.

    Raises
    ------
    CheckpointError
        What is there is no strict safetensors checkpoint.
    OSError
        It cannot be read.
    """
    path = Path(path)
    if path.suffix == ".gguf" and not path.is_dir():
        from .gguf import GgufCheckpoint

        return GgufCheckpoint(path)
    return Checkpoint(path)


def row_ranges(rows: int, columns: int, elements: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of about ``elements`` elements, one row at least."""
    step = max(1, elements // max(1, columns))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


class Checkpoint:
    """Tensors of one or several safetensors files by name.

    Attributes
    ----------
    path : Path
    files : dict of str to TensorFile
        By file name.
    file_of : dict of str to str
        Tensor name -> file name.
    entries : dict of str to Entry
    config, modelopt_config : dict or None
        config.json and hf_quant_config.json of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, TensorFile] = {}
        self.config: dict[str, Any] | None = None
        self.modelopt_config: dict[str, Any] | None = None
        self._found: Found | None = None
        if path.is_dir():
            self._open_folder()
        else:
            self.files[path.name] = TensorFile(path)
        self.file_of: dict[str, str] = {}
        self.entries: dict[str, Entry] = {}
        for file_name, file in self.files.items():
            for name, entry in file.entries.items():
                if name in self.file_of:
                    raise CheckpointError(
                        f"{printable(path)}: {printable(name)} is in {printable(file_name)} and in "
                        f"{printable(self.file_of[name])}"
                    )
                self.file_of[name] = file_name
                self.entries[name] = entry

    def _open_folder(self) -> None:
        self.config = _read_json(self.path / CONFIG)
        self.modelopt_config = _read_json(self.path / MODELOPT_CONFIG)
        index = _read_json(self.path / INDEX)
        if index is None:
            names = sorted(p.name for p in self.path.glob("*.safetensors"))
            if not names:
                raise CheckpointError(f"{printable(self.path)} holds no .safetensors file")
            if len(names) > 1 and "model.safetensors" in names:
                raise CheckpointError(
                    f"{printable(self.path)} holds {', '.join(map(printable, names))} and no "
                    f"{INDEX}: name the file that you mean"
                )
            self.files = {name: TensorFile(self.path / name) for name in names}
            return
        where = f"{printable(self.path)}/{INDEX}"
        table = index.get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
            raise CheckpointError(f"{where}: weight_map must map tensor names to file names")
        for file_name in sorted(set(table.values())):
            if not _is_plain(file_name):
                raise CheckpointError(
                    f"{where}: {file_name!r} is not the name of a .safetensors file in this folder"
                )
            self.files[file_name] = TensorFile(self.path / file_name)
        held = {name: f for f, file in self.files.items() for name in file.entries}
        if held != table:
            differ = sorted(n for n in held.keys() | table.keys() if held.get(n) != table.get(n))
            raise CheckpointError(
                f"{where} and the files disagree about {len(differ)} tensors, "
                f"first '{printable(differ[0])}': the index says "
                f"{printable(table.get(differ[0]))}, the files say {printable(held.get(differ[0]))}"
            )

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        for file in self.files.values():
            file.close()

    # --- plain tensors -----------------------------------------------------------------------

    def raw(self, name: str) -> np.ndarray:
        """The bytes of a tensor, a view: uint8, [nbytes]."""
        return self.files[self.file_of[name]].raw(name)

    def array(self, name: str) -> np.ndarray:
        """A tensor as an array, a view of the file."""
        return self.files[self.file_of[name]].array(name)

    def release(self, name: str) -> None:
        """Give back the memory that reading a tensor took."""
        self.files[self.file_of[name]].release(name)

    def release_part(self, name: str, start: int, stop: int) -> None:
        """Give back the memory of bytes ``start`` to ``stop`` of a tensor."""
        first = self.entries[name].start
        self.files[self.file_of[name]].release_range(first + start, first + stop)

    # --- quantised weights ---------------------------------------------------------------------

    @property
    def found(self) -> Found:
        """What the names mean; looked for once.

        Raises
        ------
        CheckpointError
            Weights without scales, scales without weights, shapes that do not fit.
        """
        if self._found is None:
            prefer = self.convention or "compressed-tensors"
            try:
                self._found = find_weights(self.entries, prefer)
            except CheckpointError as error:
                raise CheckpointError(f"{printable(self.path)}: {error}") from error
        return self._found

    @property
    def convention(self) -> str | None:
        """The convention that the configuration names, None where it names none of ours."""
        method = (self.quantization_config or {}).get("quant_method")
        if method == "mxfp4":
            return "gpt-oss"
        return method if method in ("compressed-tensors", "modelopt") else None

    @property
    def quantization_config(self) -> dict[str, Any] | None:
        """``quantization_config`` of config.json, or what hf_quant_config.json says."""
        config = (self.config or {}).get("quantization_config")
        if isinstance(config, dict):
            return config
        if self.modelopt_config is not None:
            return {"quant_method": "modelopt", **self.modelopt_config}
        return None

    def codes(self, weight: StoredWeight, start: int, stop: int) -> np.ndarray:
        """Codes of some rows: uint8, [stop - start, K/2 or K], low nibble = even column."""
        return self._rows(weight.parts["codes"], weight.rows, start, stop)

    def scales(self, weight: StoredWeight, start: int, stop: int) -> np.ndarray:
        """Scale bytes of some rows: uint8, [stop - start, K/V]."""
        return self._rows(weight.parts["scales"], weight.rows, start, stop)

    def _rows(self, name: str, rows: int, start: int, stop: int) -> np.ndarray:
        raw = self.raw(name)
        width = raw.size // rows if rows else 0
        return raw[start * width : stop * width].reshape(stop - start, width)

    def stored_scale(self, weight: StoredWeight, role: str = "tensor_scale") -> np.ndarray | None:
        """The tensor scale, or the activations', as the file holds it: float32, [n]; or None.

        Raises
        ------
        CheckpointError
            It is not finite, not positive, or subnormal: dividing by it gives no number.
        """
        name = weight.parts.get(role)
        if name is None:
            return None
        values = np.array(self.array(name), dtype=np.float32).reshape(-1)
        if not (np.isfinite(values) & (values >= _FLT_MIN)).all():
            bad = values[~(np.isfinite(values) & (values >= _FLT_MIN))][0]
            raise CheckpointError(
                f"{printable(name)} must be finite and at least 2^-126; it holds {bad!s}"
            )
        return values

    def decode_scale(self, weight: StoredWeight) -> np.ndarray:
        """The multiplier of a weight: float32, () or, for a stack with its own scales, [E]."""
        values = self.stored_scale(weight)
        if values is None:
            return np.asarray(np.float32(1))
        if weight.scheme.divides:
            values = np.float32(1) / values
        return values.reshape(()) if values.size == 1 else values

    def scale_of_row(self, weight: StoredWeight) -> np.ndarray:
        """The multiplier of every row: float32, [rows, 1], a broadcast view."""
        decode = self.decode_scale(weight)
        if decode.ndim:
            decode = np.repeat(decode, weight.rows // max(1, decode.size))[:, None]
        return np.broadcast_to(decode.reshape(-1, 1), (weight.rows, 1))

    def qtensor(self, module: str) -> QTensor:
        """A quantised weight as a `QTensor` in the linear scale layout.

        Raises
        ------
        KeyError
            No such module.
        """
        from ..tensor import QTensor

        weight = self.found.weights[module]
        fmt, (*lead, columns) = weight.scheme.format, weight.shape
        return QTensor.from_parts(
            self.codes(weight, 0, weight.rows).reshape(*lead, columns // fmt.codes_per_byte),
            self.scales(weight, 0, weight.rows).reshape(*lead, columns // fmt.block),
            fmt,
            shape=weight.shape,
            decode_scale=self.decode_scale(weight),
            scale_layout="linear",
        )

    def release_weight(self, weight: StoredWeight) -> None:
        """Give back the memory that reading a weight took."""
        for name in weight.names:
            self.release(name)


def _is_plain(name: str) -> bool:
    return (
        name.endswith(".safetensors")
        and name == os.path.basename(name)
        and "\\" not in name
        and not name.startswith(".")
        and name.isprintable()
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    if path.stat().st_size > _JSON_LIMIT:
        raise CheckpointError(f"{printable(path)} is larger than {_JSON_LIMIT} bytes")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{printable(path)} is not JSON in UTF-8: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{printable(path)} must be a JSON object")
    return value
