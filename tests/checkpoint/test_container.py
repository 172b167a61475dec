"""The safetensors reader: equal to the library where that can read, strict where files lie."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from nvfp4.checkpoint import CheckpointError, TensorFile
from nvfp4.checkpoint.container import DTYPES, byte_count, parse_header


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def open_bytes(tmp_path: Path, data: bytes) -> TensorFile:
    path = tmp_path / "file.safetensors"
    path.write_bytes(data)
    return TensorFile(path)


def test_every_array_of_a_library_file_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    arrays = {
        str(dtype): rng.integers(0, 100, (3, 5)).astype(dtype)
        for dtype in (
            "bool", "uint8", "int8", "int16", "uint16", "float16", "int32", "uint32", "float32",
            "float64", "int64", "uint64", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn,
            ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu,
        )
    }  # fmt: skip
    arrays |= {"scalar": np.array(4.5, "float32"), "empty": np.zeros((3, 0, 2), "int16")}
    save_file(arrays, tmp_path / "a.safetensors", metadata={"who": "é"})
    with TensorFile(tmp_path / "a.safetensors") as file:
        assert set(file.entries) == set(arrays)
        assert file.metadata == {"who": "é"}
        for name, array in arrays.items():
            got = file.array(name)
            assert got.dtype == array.dtype
            assert got.shape == array.shape
            assert got.tobytes() == array.tobytes()
            assert not got.flags.writeable


def test_an_array_can_be_read_again_after_its_memory_was_given_back(tmp_path: Path) -> None:
    array = np.arange(1 << 16, dtype="float32")
    save_file({"a": array, "b": array}, tmp_path / "a.safetensors")
    with TensorFile(tmp_path / "a.safetensors") as file:
        view = file.array("a")
        assert (view == array).all()
        file.release("a")
        assert (view == array).all()
        assert (file.array("b") == array).all()


def test_types_of_less_than_a_byte_are_read_as_bytes_only(tmp_path: Path) -> None:
    data = file_of({"x": entry("F4", [2, 4], 0, 4)}, b"\x12\x34\x56\x78")
    with open_bytes(tmp_path, data) as file:
        assert file.raw("x").tobytes() == b"\x12\x34\x56\x78"
        with pytest.raises(TypeError, match="F4"):
            file.array("x")


GOOD = entry("U8", [4], 0, 4)
LIES = {
    "nothing in it": (b"", "0 bytes cannot hold"),
    "cut inside the length": (b"\x01\x00\x00", "3 bytes cannot hold"),
    "length over the file": (file_of({}, length=1000), "claims 1000 bytes"),
    "length over the limit": (file_of({}, length=1 << 40), "at most 100000000"),
    "length of all ones": (b"\xff" * 8, "at most 100000000"),
    "no JSON": (file_of(b"{nope"), "not JSON"),
    "leading blank": (file_of(b' {"a": 1}'), "does not begin"),
    "a list": (file_of(b"[]"), "does not begin"),
    "no UTF-8": (file_of(b'{"\xff": 1}'), "not JSON in UTF-8"),
    "infinite nesting": (file_of(b'{"a":' * 100_000), "not JSON"),
    "NaN as a value": (file_of(b'{"a": NaN}'), "NaN"),
    "a huge number": (
        file_of(b'{"x":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}'),
        "value that is none",
    ),
    "a name twice": (
        file_of(b'{"x":%b,"x":%b}' % ((json.dumps(GOOD).encode(),) * 2), b"\0" * 4),
        "twice",
    ),
    "half a surrogate": (file_of(rb'{"\ud800":{}}'), "not valid Unicode"),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}}), "strings to strings"),
    "missing field": (file_of({"x": {"dtype": "U8", "shape": [4]}}, b"\0" * 4), "data_offsets"),
    "further field": (file_of({"x": {**GOOD, "y": 1}}, b"\0" * 4), "nothing else"),
    "unknown type": (file_of({"x": entry("F3", [4], 0, 4)}, b"\0" * 4), "unknown dtype 'F3'"),
    "type is a number": (file_of({"x": entry(8, [4], 0, 4)}, b"\0" * 4), "must be a string"),  # type: ignore[arg-type]
    "negative size": (file_of({"x": entry("U8", [-4], 0, 4)}, b"\0" * 4), "shape must be"),
    "size of true": (file_of({"x": entry("U8", [True, 4], 0, 4)}, b"\0" * 4), "shape must be"),
    "size of 4.0": (file_of({"x": entry("U8", [4.0], 0, 4)}, b"\0" * 4), "shape must be"),  # type: ignore[list-item]
    "product overflows": (
        file_of({"x": entry("U8", [1 << 62, 4, 1 << 62], 0, 4)}, b"\0" * 4), "takes",
    ),
    "wrong shape": (file_of({"x": entry("U8", [5], 0, 4)}, b"\0" * 4), "takes 5 bytes"),
    "wrong type": (file_of({"x": entry("F32", [4], 0, 4)}, b"\0" * 4), "takes 16 bytes"),
    "half a byte": (file_of({"x": entry("F4", [3], 0, 1)}, b"\0"), "whole bytes"),
    "offsets swapped": (file_of({"x": entry("U8", [4], 4, 0)}, b"\0" * 4), "give it -4"),
    "offsets negative": (file_of({"x": entry("U8", [4], -4, 0)}, b"\0" * 4), "two whole numbers"),
    "offsets three": (
        file_of({"x": {**GOOD, "data_offsets": [0, 4, 8]}}, b"\0" * 4), "two whole numbers",
    ),
    "overlap": (
        file_of({"x": GOOD, "y": entry("U8", [4], 2, 6)}, b"\0" * 6), "'y' overlaps",
    ),
    "the same bytes twice": (file_of({"x": GOOD, "y": GOOD}, b"\0" * 4), "overlaps"),
    "gap": (file_of({"x": GOOD, "y": entry("U8", [2], 5, 7)}, b"\0" * 7), "'y' leaves a gap"),
    "gap at the start": (file_of({"x": entry("U8", [2], 1, 3)}, b"\0" * 3), "leaves a gap"),
    "truncated": (file_of({"x": GOOD}, b"\0" * 3), "truncated"),
    "data after the end": (file_of({"x": GOOD}, b"\0" * 5), "the file has 5"),
}  # fmt: skip


@pytest.mark.parametrize("case", LIES)
def test_a_lie_in_the_file_is_an_error_that_names_the_file(case: str, tmp_path: Path) -> None:
    data, message = LIES[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        open_bytes(tmp_path, data)
    assert "file.safetensors" in str(caught.value)


def test_names_are_shown_without_control_characters(tmp_path: Path) -> None:
    header = {"\x1b[31mred\n": entry("U8", [5], 0, 4)}
    with pytest.raises(CheckpointError) as caught:
        open_bytes(tmp_path, file_of(header, b"\0" * 4))
    assert "\x1b" not in str(caught.value)
    assert r"\x1b[31mred\n" in str(caught.value)


def test_a_missing_file_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TensorFile(tmp_path / "none.safetensors")


def test_a_pipe_is_an_error_and_nothing_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(CheckpointError, match=r"pipe\.safetensors is not a regular file"):
        TensorFile(tmp_path / "pipe.safetensors")


# --- against the library -------------------------------------------------------------------

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=4) | st.just("__metadata__")
sizes = st.integers(-1, 5) | st.sampled_from([1 << 31, 1 << 62, 1 << 63, 1 << 64])
junk = st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.text(max_size=3)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "f32", "F3"]) | junk,
        "shape": st.lists(sizes, max_size=3) | st.lists(junk, max_size=2) | junk,
        "data_offsets": st.tuples(sizes, sizes).map(list) | st.lists(sizes, max_size=3) | junk,
    },
    optional={"extra": junk},
)
metadata = st.dictionaries(st.text(max_size=3), st.text(max_size=3) | junk, max_size=2)


@st.composite
def sound_headers(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A header that is right, and the size of its data."""
    header: dict[str, Any] = {}
    end = 0
    for name in draw(st.lists(names.filter("__metadata__".__ne__), unique=True, max_size=4)):
        dtype = draw(st.sampled_from(list(DTYPES)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        if DTYPES[dtype].bits < 8:
            shape = [*shape, 8]
        size = byte_count(dtype, tuple(shape))
        header[name] = entry(dtype, shape, end, end + size)
        end += size
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.dictionaries(st.text(max_size=3), st.text(max_size=3)))
    keys = draw(st.permutations(list(header)))
    return {key: header[key] for key in keys}, end


@st.composite
def broken_files(draw: st.DrawFn) -> bytes:
    """A file with one or two things wrong, or by luck none."""
    header, size = draw(sound_headers())
    for _ in range(draw(st.integers(0, 2))):
        key = draw(st.sampled_from([*header, "new"]))
        change = draw(st.sampled_from(["entry", "field", "drop", "junk"]))
        if change == "drop":
            header.pop(key, None)
        elif change == "field" and isinstance(header.get(key), dict):
            field = draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
            header[key] = {**header[key], field: draw(entries)[field]}
        else:
            header[key] = draw(entries if change == "entry" else junk | metadata)
    text = json.dumps(header).encode()
    text += b" " * draw(st.integers(0, 3))
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(text) - 1))
        text = text[:at] + bytes([draw(st.integers(0, 255))]) + text[at + 1 :]
    length = len(text) + draw(st.sampled_from([0, 0, 0, 0, -1, 1]))
    data = bytes(max(0, size + draw(st.sampled_from([0, 0, 0, 0, -1, 1]))))
    return file_of(text, data, length)


def ours(data: bytes) -> dict[str, tuple[str, list[int], bytes]] | CheckpointError:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        return CheckpointError("length")
    body = data[8 + length :]
    try:
        found, _ = parse_header(data[8 : 8 + length], len(body))
    except CheckpointError as error:
        return error
    return {n: (e.dtype, list(e.shape), body[e.start : e.stop]) for n, e in found.items()}


def librarys(data: bytes) -> dict[str, tuple[str, list[int], bytes]] | Exception:
    try:
        found = safetensors.deserialize(data)
    except Exception as error:
        return error
    return {n: (e["dtype"], list(e["shape"]), bytes(e["data"])) for n, e in found}


@given(sound_headers())
@settings(max_examples=150, deadline=None)
def test_what_is_right_is_read_as_the_library_reads_it(header: tuple[dict[str, Any], int]) -> None:
    data = file_of(header[0], bytes(range(256)) * (header[1] // 256) + bytes(header[1] % 256))
    assert ours(data) == librarys(data)


@given(broken_files())
@settings(max_examples=300, deadline=None)
def test_nothing_is_accepted_that_the_library_refuses(data: bytes) -> None:
    mine, theirs = ours(data), librarys(data)
    if not isinstance(mine, CheckpointError):
        assert mine == theirs
    elif not isinstance(theirs, Exception):
        # Stricter on purpose: fields and names that have no meaning.
        assert any(
            text in str(mine) for text in ("nothing else", "twice", "0 to 2^63", "whole bytes")
        ), mine


@given(st.binary(max_size=80))
@settings(max_examples=200, deadline=None)
def test_random_bytes_are_an_error_and_never_another_exception(data: bytes) -> None:
    assert isinstance(ours(data), CheckpointError) or librarys(data) == ours(data)


def test_the_order_of_types_is_the_librarys() -> None:
    arrays = {
        "a": np.zeros(3, "uint8"), "b": np.zeros(3, "float32"), "c": np.zeros(3, "int64"),
        "d": np.zeros(3, "bool"), "e": np.zeros(3, "float16"), "f": np.zeros(3, "int8"),
    }  # fmt: skip
    data = save(arrays)
    length = int.from_bytes(data[:8], "little")
    found, _ = parse_header(data[8 : 8 + length], len(data) - 8 - length)
    ranks = [list(DTYPES).index(e.dtype) for e in found.values()]
    assert ranks == sorted(ranks, reverse=True)
