"""Which tensors of a dense checkpoint are quantised, and why the others are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..formats import BlockFormat, block_format
from .container import FLOATS, Entry
from .errors import printable
from .model import Checkpoint

__all__ = ["Choice", "choose"]

# What every published recipe leaves alone, by name. An embedding is looked up, not multiplied;
# loaders keep routers of experts unquantised; the output head decides between near-equal tokens.
KEPT: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("an embedding", ("*embed*", "*.wte.weight", "wte.weight", "*.wpe.weight", "wpe.weight",
                      "shared.weight", "*.shared.weight")),
    ("a norm", ("*norm*", "*Norm*", "*.ln_*", "ln_*", "*_ln.weight")),
    ("the output head", ("lm_head*", "*.lm_head*", "output.weight", "head.weight",
                         "cls.predictions*", "score.weight", "classifier.weight",
                         "*.classifier.weight", "*.score.weight")),
    ("a router of experts", ("*.gate.weight", "*router*", "*.shared_expert_gate.weight")),
)  # fmt: skip
_EXPERTS = ("*experts.gate_up_proj", "*experts.down_proj")
_WILD = "*?["


@dataclass(frozen=True)
class Choice:
    """What happens to one dense tensor.

    Attributes
    ----------
    name : str
    entry : Entry
    format : BlockFormat or None
        None: it stays as it is.
    module : str
        Prefix of the quantised tensors.
    transposed : bool
        It is stored [..., K, N].
    reason : str
        Why it stays; empty for what is quantised.
    """

    name: str
    entry: Entry
    format: BlockFormat | None
    module: str
    transposed: bool = False
    reason: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., K]."""
        *lead, rows, columns = self.entry.shape
        return (*lead, columns, rows) if self.transposed else (*lead, rows, columns)


def choose(
    model: Checkpoint,
    fmt: BlockFormat,
    convention: str,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    overrides: Sequence[tuple[str, str]] = (),
) -> list[Choice]:
    """Decide for every tensor that is not part of a quantised weight already.

    Parameters
    ----------
    model : Checkpoint
    fmt : BlockFormat
    convention : str
    include : sequence of str
        Patterns (``*``, ``?``, ``[...]``) on whole tensor names. If there are any, exactly the
        weights that match one are quantised, embeddings too; if there are none, all weights but
        embeddings, norms, output heads and routers.
    exclude : sequence of str
        What matches one of these stays as it is.
    overrides : sequence of (pattern, format name or "none")
        Another format for some of the chosen; the last that matches counts.

    Raises
    ------
    ValueError
        A pattern that matches no tensor, or names a tensor that cannot be quantised.
    """
    for option, patterns in (
        ("include", include), ("exclude", exclude), ("override", [p for p, _ in overrides]),
    ):  # fmt: skip
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in model.entries):
                raise ValueError(f"{option} {pattern!r} matches no tensor of {model.path}")
    formats = [(p, None if f == "none" else block_format(f)) for p, f in overrides]
    plain = model.found.plain
    # gpt-oss means the experts; where a model has none, it can still be written that way.
    stacked_only = convention == "gpt-oss" and any(
        len(model.entries[n].shape) == 3 and _module(n, convention) is not None for n in plain
    )
    choices = []
    for name in plain:
        entry = model.entries[name]
        wanted = fmt
        for pattern, other in formats:
            if fnmatchcase(name, pattern):
                wanted = other  # type: ignore[assignment]
        module = _module(name, convention)
        reason = _stays(name, entry, module, include, exclude, stacked_only)
        if not reason and wanted is None:
            reason = "overridden"
        transposed = module == name
        choice = Choice(name, entry, wanted, module or name, transposed, reason)
        if not reason and wanted is not None and choice.shape[-1] % wanted.block:
            reason = f"K = {choice.shape[-1]} is not a multiple of {wanted.block}"
        if reason:
            if any(p == name and not any(c in p for c in _WILD) for p in include):
                raise ValueError(f"include {name!r} cannot be quantised: {reason}")
            choice = Choice(name, entry, None, module or name, transposed, reason)
        choices.append(choice)
    return choices


def _module(name: str, convention: str) -> str | None:
    """Prefix of the quantised weight of a tensor; None if its name is not a weight's."""
    if name.endswith(".weight"):
        return name.removesuffix(".weight")
    if convention == "gpt-oss" and any(fnmatchcase(name, p) for p in _EXPERTS):
        return name
    return None


def _stays(
    name: str,
    entry: Entry,
    module: str | None,
    include: Sequence[str],
    exclude: Sequence[str],
    stacked_only: bool,
) -> str:
    """Why a tensor stays as it is, or nothing."""
    if any(fnmatchcase(name, pattern) for pattern in exclude):
        return "excluded"
    if include and not any(fnmatchcase(name, pattern) for pattern in include):
        return "not included"
    if module is None:
        return "not a *.weight"
    if not include:
        for what, patterns in KEPT:
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                return what
    if len(entry.shape) not in (2, 3):
        return f"{len(entry.shape)} axes"
    if entry.dtype not in FLOATS:
        return entry.dtype
    if 0 in entry.shape:
        return "empty"
    if not include and stacked_only and len(entry.shape) == 2:
        return "not a stack of experts"
    return ""


# Parts that loaders concatenate into one matrix with one tensor scale.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)


def fused_groups(modules: Sequence[str]) -> list[tuple[str, ...]]:
    """Groups of the modules that loaders fuse, each in the order of its names."""
    present = set(modules)
    groups = []
    for module in modules:
        parent, _, last = module.rpartition(".")
        for names in FUSED:
            if last == names[0]:
                group = tuple(f"{parent}.{n}" if parent else n for n in names)
                group = tuple(m for m in group if m in present)
                if len(group) > 1:
                    groups.append(group)
    return groups


def describe(choice: Choice) -> str:
    """One line about a choice, without control characters."""
    what = choice.format.name if choice.format else f"kept ({choice.reason})"
    return f"{printable(choice.name)} {choice.entry.dtype} {list(choice.entry.shape)}: {what}"
