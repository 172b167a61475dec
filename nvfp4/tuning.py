"""Tables of measured divisions of products with prepared weights, which overrule the formulas.

A plan's formulas know rows, columns, depth, ranges and multiprocessors. Where ``nvfp4 tune`` has
measured something better on a card, a table says so, for that card, those formats and that shape.
Tables are JSON files, read once a process, when the first such product is planned:

1. the file that ``NVFP4_TUNE_TABLE`` names,
2. ``tune/<card>.json`` in the cache directory (the first of ``NVFP4_CACHE_DIR``),
3. ``nvfp4/tables/<card>.json``, shipped with the package.

For each product the first table that knows it counts. A row says which kernels it was measured with
(a digest of their sources and of the formulas); one of other kernels than the present ones is no
advice any more, and is left out without a word. A file that is cut off, of another kind or of
another card costs a warning and is ignored (that of the package without one, where a share of its
card has fewer multiprocessors). Plans are kept, so that calls that are repeated never come here.
The simulated machine, which is no card, has no table.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Choice", "Key", "Table", "file_of_card", "find", "forget", "kernels", "key_of", "read",
           "trying", "write"]  # fmt: skip

#: Of the files; raised when a field changes its meaning.
SCHEMA = 1
KIND = "nvfp4 tune table"
KERNELS = ("decode", "sm90")
VARIABLE = "NVFP4_TUNE_TABLE"


class Key(NamedTuple):
    """What a row of a table is for.

    Attributes
    ----------
    a, b
        A dtype or a format of A, a format of B.
    result
        "plain", or "codes" with the block ("codes 16").
    pair
        How an epilogue takes pairs: "none", "halves", "interleaved".
    columns, depth
    groups
        Ranges of a grouped product, 0 of a dense one.
    rows
        The largest number of rows of the class, a power of two: 1, 2, 4 and so on.
    """

    a: str
    b: str
    result: str
    pair: str
    columns: int
    depth: int
    groups: int
    rows: int


class Choice(NamedTuple):
    """A division: ``plans_prepared.Cut`` for "decode", ``plans_sm90.Tile`` for "sm90".

    What a row of a file does not name has the value here, and so has what is the other kernel's.
    `resident` 0 of "sm90" is what the formulas have with such tiles.
    """

    kernel: str
    chunk: int = 0
    team: int = 0
    stripes: int = 0
    slots: int = 0
    resident: int = 0
    tokens: int = 0
    warps: int = 8
    split: int = 1

    def wrong(self) -> str:
        """Why it is none; empty: it is one, of some product."""
        if self.kernel not in KERNELS:
            return f"kernel must be one of {', '.join(KERNELS)}; got {self.kernel!r}"
        others = {name: (value,) for name, value in self._field_defaults.items()}
        for name, values in (others | _ALLOWED[self.kernel]).items():
            got = getattr(self, name)
            if type(got) is not int or got not in values:
                allowed = ", ".join(map(str, values))
                return f"{name} of {self.kernel!r} must be one of {allowed}; got {got!r}"
        if self.kernel == "decode" and self.warps % self.team:
            return f"team must divide warps, which are {self.warps}; got {self.team}"
        if self.tokens % (8 * self.split):
            return f"tokens must be a multiple of 8 * split, {8 * self.split}; got {self.tokens}"
        return ""

    def made(self, constants: Mapping[str, Any]) -> bool:
        """Whether a program with these constants is divided so."""
        names = {"chunk": "CHUNK", "warps": "WARPS", "team": "TEAM", "stripes": "STRIPES"}
        if self.kernel == "sm90":
            names = {"tokens": "CHUNK", "split": "SPLIT"}
            names |= {"resident": "BLOCKS_PER_SM"} if self.resident else {}
        return all(constants.get(there) == getattr(self, here) for here, there in names.items())


_ALLOWED: dict[str, dict[str, tuple[int, ...]]] = {
    "decode": {
        **{"chunk": (8, 16), "warps": (4, 6, 8), "team": (1, 2, 3, 4, 6, 8), "stripes": (1, 2)},
        **{"slots": (1, 2, 3, 4), "resident": tuple(range(1, 10))},
    },
    "sm90": {"tokens": tuple(range(16, 161, 8)), "split": (1, 2, 4, 8), "resident": (0, 1, 2)},
}


class Table(NamedTuple):
    """A file.

    Attributes
    ----------
    card
        Name of the card, as the driver has it.
    processors
        Its multiprocessors.
    choices
        What was found better.
    notes
        The same keys: what was measured, as the file has it.
    stale
        Rows of the file that were measured with other kernels, and are in neither.
    """

    card: str
    processors: int
    choices: dict[Key, Choice]
    notes: dict[Key, dict[str, Any]]
    stale: int = 0


_FORMAT = {
    **{("e2m1", "e4m3"): "nvfp4", ("e2m1", "e8m0"): "mxfp4"},
    **{("e4m3", "e8m0"): "mxfp8_e4m3", ("e5m2", "e8m0"): "mxfp8_e5m2"},
}


def key_of(
    constants: Mapping[str, Any], rows: int, columns: int, depth: int, groups: int | None
) -> Key:
    """Of a product as plans know it."""
    a = constants["INPUT"]
    if constants["A_ELEMENT"] != "none":
        a = _FORMAT.get((constants["A_ELEMENT"], constants["A_SCALE"]), constants["A_ELEMENT"])
    result = "plain"
    if constants["OUTPUT"] == "codes":
        result = f"codes {16 if constants['SCALE'] == 'e4m3' else 32}"
    b = _FORMAT[constants["B_ELEMENT"], constants["B_SCALE"]]
    most = 1 << max(0, rows - 1).bit_length()
    return Key(a, b, result, constants["PAIR"], columns, depth, groups or 0, most)


# --- what a row was measured with -----------------------------------------------------------------

#: What decides how fast a product with prepared weights is: files of ``kernels``, and the formulas.
_SOURCES = (
    "matmul_decode", "decode_*", "matmul_sm90", "prepared*", "sm90_*", "activations", "fp8_*",
    "grouped_pieces", "groups", "mma_tiles", "products", "rings", "schedule", "warps",
)  # fmt: skip
_DOCSTRING = re.compile(r'r?"""[\s\S]*?"""')


@functools.cache
def kernels() -> str:
    """Digest of the kernels that tables choose between, and of the formulas beside them.

    Comments that stand alone, docstrings and empty lines are no part of it.
    """
    package = Path(__file__).parent
    files = {f for name in _SOURCES for f in (package / "kernels").glob(f"{name}.py")}
    digest = hashlib.sha256()
    for file in (package / "plans_prepared.py", package / "plans_sm90.py", *sorted(files)):
        digest.update(file.name.encode() + b"\0" + _code(file.read_text(encoding="utf-8")))
    return digest.hexdigest()[:16]


def _code(source: str) -> bytes:
    lines = _DOCSTRING.sub("", source).splitlines()
    kept = [line.rstrip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return "\n".join(kept).encode()


# --- files ----------------------------------------------------------------------------------------


def read(file: Path) -> Table:
    """A table.

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        It is no table; the message says why.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON, or cut off: {error}") from error
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise ValueError(f"it is not a table of {KIND.split(' table')[0]!r}")
    if found.get("schema") != SCHEMA:
        raise ValueError(f"its schema must be {SCHEMA}; got {found.get('schema')!r}")
    card, processors, rows = (found.get(name) for name in ("card", "processors", "rows"))
    if not isinstance(card, str) or type(processors) is not int or not isinstance(rows, list):
        raise ValueError("card, processors and rows must be a name, a number and a list")
    table, stale = Table(card, processors, {}, {}), 0
    for number, row in enumerate(rows, 1):
        if isinstance(row, dict) and row.get("kernels") != kernels():
            stale += 1  # whatever it says
            continue
        try:
            key, choice = Key(**row["key"]), Choice(**row["choice"])
        except (TypeError, KeyError) as error:
            raise ValueError(f"row {number}: key and choice must be whole; {error}") from error
        wrong = _wrong_key(key) or choice.wrong()
        if wrong:
            raise ValueError(f"row {number}: {wrong}")
        table.choices[key], table.notes[key] = choice, row.get("measured", {})
    return table._replace(stale=stale)


def _wrong_key(key: Key) -> str:
    for name, value in key._asdict().items():
        kind = str if name in ("a", "b", "result", "pair") else int
        if type(value) is not kind:
            return f"{name} must be of type {kind.__name__}; got {value!r}"
        if isinstance(value, int) and value < 0:
            return f"{name} must not be negative; got {value}"
    if key.rows & (key.rows - 1) or not key.rows:
        return f"rows must be a power of two, the most of their class; got {key.rows}"
    return ""


def write(file: Path, table: Table) -> None:
    """Write a table whole or not at all; its rows are of the present kernels."""
    rows = [
        {
            "key": key._asdict(),
            "choice": choice._asdict(),
            "kernels": kernels(),
            "measured": table.notes.get(key, {}),
        }
        for key, choice in sorted(table.choices.items())
    ]
    head = {"kind": KIND, "schema": SCHEMA, "card": table.card, "processors": table.processors}
    text = json.dumps({**head, "rows": rows}, indent=1) + "\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    other = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        other.write_text(text, encoding="utf-8")
        other.replace(file)
    finally:
        other.unlink(missing_ok=True)


def slug(card: str) -> str:
    """A card's name as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")


def file_of_card(card: str) -> Path:
    """Where a user's table of a card is, without ``NVFP4_TUNE_TABLE``."""
    from .cache import default_cache

    return default_cache().directories[0] / "tune" / f"{slug(card)}.json"


# --- what plans ask -------------------------------------------------------------------------------


_tried: list[Choice | None] = []


def find(card: tuple[str, int] | None, key: Callable[[], Key]) -> Choice | None:
    """What a table of the card (its name and multiprocessors) has for a product; None: nothing."""
    if _tried:
        return _tried[-1]
    if card is None:
        return None
    tables = _tables(*card)
    if not tables:
        return None
    wanted = key()
    return next((t.choices[wanted] for t in tables if wanted in t.choices), None)


@functools.cache
def _tables(card: str, processors: int) -> tuple[Table, ...]:
    """The tables of a card, the first to be asked first."""
    files = [Path(__file__).parent / "tables" / f"{slug(card)}.json"]
    named = os.environ.get(VARIABLE, "")
    with contextlib.suppress(RuntimeError):  # no home
        named = str(Path(named).expanduser()) if named else ""
    with contextlib.suppress(OSError, RuntimeError, IndexError):
        files.insert(0, file_of_card(card))
    if named:
        files.insert(0, Path(named))
    found = []
    for left, file in zip(reversed(range(len(files))), files, strict=True):
        try:
            table = read(file)
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            # A cache that this user may not look into has no table for him.
            if named and file == Path(named):
                refused = isinstance(error, PermissionError)
                _warn(file, str(error) if refused else "there is no such file")
            continue
        except (OSError, ValueError) as error:
            _warn(file, str(error))
            continue
        if (table.card, table.processors) != (card, processors):
            # Of the package's nobody asked for: a share of a card has fewer multiprocessors.
            if left:
                _warn(
                    file,
                    f"it is of {table.card} with {table.processors} multiprocessors, and this is "
                    f"{card} with {processors}",
                )
            continue
        if table.choices:
            found.append(table)
    return tuple(found)


def _warn(file: Path, why: str) -> None:
    warnings.warn(f"the tune table {file} is ignored: {why}", RuntimeWarning, stacklevel=2)


def forget() -> None:
    """Read the tables again when they are asked for; what is planned already stays."""
    _tables.cache_clear()


@contextlib.contextmanager
def trying(choice: Choice | None) -> Iterator[None]:
    """Plan every product by this choice, whatever tables say; None: by the formulas.

    It holds for all threads, and for what was not planned before.
    """
    _tried.append(choice)
    try:
        yield
    finally:
        _tried.pop()
