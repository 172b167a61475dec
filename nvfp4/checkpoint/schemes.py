"""How each convention stores a quantised weight: tables, and the search for them in a file.

Source: the formats as compressed-tensors, ModelOpt and gpt-oss write them. A weight is several
tensors that share a prefix, its *module*; a scheme says which suffix and type each of them has.
Nothing here reads data: names, types and shapes are enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..errors import UnsupportedError
from ..formats import MXFP4, MXFP8_E4M3, NVFP4, BlockFormat, block_format
from .container import Entry
from .errors import CheckpointError, printable

__all__ = [
    "CONVENTIONS",
    "SCHEMES",
    "Foreign",
    "Found",
    "Scheme",
    "StoredWeight",
    "find_weights",
    "scheme_for",
]

CONVENTIONS = ("compressed-tensors", "modelopt", "gpt-oss")


@dataclass(frozen=True)
class Scheme:
    """One way to store a weight.

    Attributes
    ----------
    convention : str
    format : BlockFormat
    algorithm : str
        What the convention's configuration calls it.
    codes, scales : str
        Suffixes of the tensors that every weight has.
    codes_dtype, scales_dtype : str
    tensor_scale, input_scale : str or None
        Suffixes of the scale of the whole tensor and of the activations, where there are such.
    divides : bool
        These two are divisors (the encode scale) rather than multipliers (the decode scale).
    scalar : tuple of int
        Shape of the scale of a whole matrix.
    split : bool
        Codes are [..., K/V, V/2] rather than [..., K/2]; the bytes are the same.
    write : bool
        False for layouts that are only read.
    """

    convention: str
    format: BlockFormat
    algorithm: str
    codes: str
    codes_dtype: str
    scales: str
    scales_dtype: str
    tensor_scale: str | None = None
    input_scale: str | None = None
    divides: bool = False
    scalar: tuple[int, ...] = (1,)
    split: bool = False
    write: bool = True
    extras: tuple[str, ...] = ()

    def outputs(
        self, module: str, shape: tuple[int, ...], *, with_input: bool = False
    ) -> dict[str, tuple[str, str, tuple[int, ...]]]:
        """Role -> (name, dtype, shape) of the tensors of a weight of logical shape [..., K]."""
        *lead, columns = shape
        blocks = columns // self.format.block
        packed = columns // self.format.codes_per_byte
        codes = (*lead, blocks, packed // blocks) if self.split else (*lead, packed)
        # A stack of matrices has one scale each, shaped to broadcast against its block scales.
        scalar = (*lead[:-1], 1, 1) if len(lead) > 1 else self.scalar
        found = {
            "codes": (module + self.codes, self.codes_dtype, codes),
            "scales": (module + self.scales, self.scales_dtype, (*lead, blocks)),
        }
        if self.tensor_scale is not None:
            found["tensor_scale"] = (module + self.tensor_scale, "F32", scalar)
        if with_input and self.input_scale is not None:
            found["input_scale"] = (module + self.input_scale, "F32", self.scalar)
        return found


_CT = "compressed-tensors"
_MODELOPT_EXTRAS = (".pre_quant_scale", ".svdquant_lora_a", ".svdquant_lora_b")

SCHEMES: tuple[Scheme, ...] = (
    Scheme(
        _CT, NVFP4, "nvfp4-pack-quantized", ".weight_packed", "U8", ".weight_scale", "F8_E4M3",
        ".weight_global_scale", ".input_global_scale", divides=True,
    ),
    Scheme(
        _CT, MXFP4, "mxfp4-pack-quantized", ".weight_packed", "U8", ".weight_scale", "U8",
    ),
    Scheme(_CT, MXFP8_E4M3, "mxfp8-quantized", ".weight", "F8_E4M3", ".weight_scale", "U8"),
    Scheme(
        "modelopt", NVFP4, "NVFP4", ".weight", "U8", ".weight_scale", "F8_E4M3",
        ".weight_scale_2", ".input_scale", scalar=(), extras=_MODELOPT_EXTRAS,
    ),
    Scheme("modelopt", MXFP8_E4M3, "MXFP8", ".weight", "F8_E4M3", ".weight_scale", "U8"),
    # ModelOpt packs it for W4A8_MXFP4_FP8 only, which promises activations that we know nothing of.
    Scheme(
        "modelopt", MXFP4, "W4A8_MXFP4_FP8", ".weight", "U8", ".weight_scale", "U8", write=False,
        input_scale=".input_scale", extras=_MODELOPT_EXTRAS,
    ),
    Scheme("gpt-oss", MXFP4, "mxfp4", "_blocks", "U8", "_scales", "U8", split=True),
    # The names of the first release; transformers renamed them.
    Scheme("gpt-oss", MXFP4, "mxfp4", ".blocks", "U8", ".scales", "U8", split=True, write=False),
)  # fmt: skip


def scheme_for(convention: str, format: str | BlockFormat) -> Scheme:
    """The scheme that writes a format in a convention.

    Raises
    ------
    ValueError
        Unknown convention or format.
    UnsupportedError
        The convention cannot hold the format.
    """
    if convention not in CONVENTIONS:
        raise ValueError(
            f"convention must be one of {', '.join(map(repr, CONVENTIONS))}; got {convention!r}"
        )
    fmt = block_format(format)
    for scheme in SCHEMES:
        if scheme.convention == convention and scheme.format == fmt and scheme.write:
            return scheme
    held = sorted({s.format.name for s in SCHEMES if s.convention == convention and s.write})
    others = sorted({s.convention for s in SCHEMES if s.format == fmt and s.write})
    raise UnsupportedError(
        f"the convention {convention} has no weights in {fmt.name}; it has {', '.join(held)}"
        + (f"; {fmt.name} can be written as {', '.join(others)}" if others else "")
    )


@dataclass(frozen=True)
class StoredWeight:
    """A quantised weight of a checkpoint.

    Attributes
    ----------
    module : str
        Prefix of its tensors.
    scheme : Scheme
    parts : dict of str to str
        Role ("codes", "scales", "tensor_scale", "input_scale") -> name of the tensor.
    shape : tuple of int
        Logical shape [..., K].
    extras : tuple of str
        Further tensors of the module that change what its product is.
    """

    module: str
    scheme: Scheme
    parts: dict[str, str]
    shape: tuple[int, ...]
    extras: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of the codes, all leading axes together."""
        return math.prod(self.shape[:-1])

    @property
    def names(self) -> tuple[str, ...]:
        """All its tensors."""
        return (*self.parts.values(), *self.extras)


@dataclass(frozen=True)
class Foreign:
    """A weight in a format that is passed through: FP8 by tensor or by channel, or something else.

    ``kind`` is "fp8", "fp8-channel", or "other".
    """

    module: str
    kind: str
    names: tuple[str, ...]


@dataclass
class Found:
    """What the names of a checkpoint mean."""

    weights: dict[str, StoredWeight] = field(default_factory=dict)
    foreign: dict[str, Foreign] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)


# A tensor with one of these suffixes belongs to a quantised weight; alone it is a mistake.
_SATELLITES = (
    ".weight_packed", ".weight_scale", ".weight_scale_2", ".weight_scale_inv",
    ".weight_global_scale", ".input_global_scale", ".input_scale", ".weight_zero_point",
    ".weight_shape", ".weight_g_idx", ".pre_quant_scale",
)  # fmt: skip


def find_weights(entries: Mapping[str, Entry], prefer: str = "compressed-tensors") -> Found:
    """Sort the tensors of a checkpoint into quantised weights, foreign ones and plain tensors.

    Parameters
    ----------
    entries : mapping of str to Entry
        All tensors, of all files.
    prefer : str
        The convention to name where two store a weight alike (mxfp8).

    Raises
    ------
    CheckpointError
        A weight without its scales, scales without a weight, or shapes that do not belong together.
    """
    found = Found()
    taken: set[str] = set()
    for name, entry in entries.items():
        weight = _weight_at(name, entry, entries, prefer)
        if weight is None:
            continue
        if isinstance(weight, Foreign):
            found.foreign[weight.module] = weight
        else:
            found.weights[weight.module] = weight
        taken.update(weight.names)
    found.plain = [name for name in entries if name not in taken]
    orphans = [name for name in found.plain if name.endswith(_SATELLITES)]
    orphans += [
        name
        for name in found.plain
        if name.endswith(("_scales", ".scales")) and entries[name].dtype == "U8"
    ]
    if orphans:
        raise CheckpointError(
            "tensors of quantised weights that no weight uses (its codes are missing, or have "
            f"another type): {_listed(orphans)}"
        )
    return found


def _listed(names: Iterable[str], most: int = 5) -> str:
    names = list(names)
    shown = ", ".join(printable(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def _weight_at(
    name: str, entry: Entry, entries: Mapping[str, Entry], prefer: str
) -> StoredWeight | Foreign | None:
    """The weight whose codes are this tensor, None if it holds none."""
    for suffix in (".weight_packed", ".weight", "_blocks", ".blocks"):
        module = name.removesuffix(suffix)
        if module != name:
            break
    else:
        return None
    if suffix == ".weight_packed" and entry.dtype != "U8":
        return _foreign(module, name, entries)  # four-bit integers in words of 32 bits
    if suffix == ".weight" and entry.dtype not in ("U8", "F8_E4M3"):
        return None
    if suffix in ("_blocks", ".blocks") and (
        entry.dtype != "U8" or len(entry.shape) < 3 or entry.shape[-1] != 16
    ):
        return None
    schemes = [s for s in SCHEMES if s.codes == suffix and s.codes_dtype == entry.dtype]
    schemes.sort(key=lambda s: s.convention != prefer)
    scales = entries.get(module + schemes[0].scales)
    if scales is None:
        if suffix != ".weight":
            raise CheckpointError(
                f"{printable(name)} has no block scales: {printable(module)}"
                f"{schemes[0].scales} is missing"
            )
        if entry.dtype == "F8_E4M3" and module + ".weight_scale_inv" in entries:
            return _foreign(module, name, entries)
        if entry.dtype == "F8_E4M3" and len(entry.shape) < 2:
            return None
        raise CheckpointError(
            f"{printable(name)} is {entry.dtype}, and has no scales: "
            f"{printable(module)}.weight_scale is missing"
        )
    for scheme in schemes:
        if scheme.scales_dtype == scales.dtype:
            return _stored(module, scheme, entry, scales, entries)
    if entry.dtype == "F8_E4M3" and scales.dtype in ("F32", "BF16", "F16"):
        return _foreign(module, name, entries)
    allowed = ", ".join(sorted({s.scales_dtype for s in schemes}))
    raise CheckpointError(
        f"{printable(module)}{schemes[0].scales} is {scales.dtype}; "
        f"beside codes in {entry.dtype} it must be {allowed}"
    )


def _stored(
    module: str, scheme: Scheme, codes: Entry, scales: Entry, entries: Mapping[str, Entry]
) -> StoredWeight:
    where, fmt = printable(module), scheme.format
    shape = codes.shape
    if scheme.split:
        shape = (*shape[:-2], shape[-2] * shape[-1])
    if len(shape) < 2:
        raise CheckpointError(f"{where}: codes must have two axes or more; got {list(codes.shape)}")
    shape = (*shape[:-1], shape[-1] * fmt.codes_per_byte)
    if shape[-1] % fmt.block or scales.shape != (*shape[:-1], shape[-1] // fmt.block):
        raise CheckpointError(
            f"{where}: scales {list(scales.shape)} do not belong to {fmt.name} codes "
            f"{list(codes.shape)}: one scale is for {fmt.block} columns"
        )
    parts = {"codes": module + scheme.codes, "scales": module + scheme.scales}
    matrices = math.prod(shape[:-2])
    for role, suffix in (
        ("tensor_scale", scheme.tensor_scale),
        ("input_scale", scheme.input_scale),
    ):
        if suffix is None:
            continue
        entry = entries.get(module + suffix)
        if entry is None:
            if role == "tensor_scale":
                raise CheckpointError(f"{where} has no tensor scale: {where}{suffix} is missing")
            continue
        if entry.dtype != "F32" or math.prod(entry.shape) not in (1, matrices):
            raise CheckpointError(
                f"{where}{suffix} must be F32 with 1 value"
                + (f" or {matrices}" if matrices > 1 else "")
                + f"; got {entry.dtype} {list(entry.shape)}"
            )
        parts[role] = module + suffix
    extras = tuple(module + suffix for suffix in scheme.extras if module + suffix in entries)
    return StoredWeight(module, scheme, parts, shape, extras)


def _foreign(module: str, name: str, entries: Mapping[str, Entry]) -> Foreign:
    """A weight that is passed through as it is, with all tensors that belong to it."""
    names = [name] + [module + suffix for suffix in _SATELLITES if module + suffix in entries]
    kind = "other"
    scale = entries.get(module + ".weight_scale")
    if name.endswith(".weight") and scale is not None:
        count = math.prod(scale.shape)
        if count == 1:
            kind = "fp8"
        elif count == entries[name].shape[0]:
            kind = "fp8-channel"
    return Foreign(module, kind, tuple(dict.fromkeys(names)))
