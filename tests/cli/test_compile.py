"""``nvfp4 compile``, on kernels that build in a moment where any kernel will do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from nvfp4 import compile as compiler
from nvfp4 import kernels, warm
from nvfp4.architectures import ARCHITECTURES
from nvfp4.cache import Cache
from nvfp4.cli.compile import _map
from nvfp4.cli.main import program
from nvfp4.kernels.seeds import SEEDS

from ..compile import programs as own

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NVFP4_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The register has four kernels of the tests: two that pass the gate, two that do not."""
    own_variants = {"multiply": ({"FACTOR": 3}, {"FACTOR": 5})}
    monkeypatch.setattr(own, "VARIANTS", own_variants, raising=False)
    listed = (own.MULTIPLY, own.REVERSE, own.IN_DOUBLE, own.UNBOUNDED)
    register = ({k.name: k for k in listed}, {k.name: own for k in listed})
    monkeypatch.setattr(kernels, "_register", lambda: register)


def run(*arguments: str, code: int = 0) -> Result:
    """The command, with its exit code checked."""
    result = CliRunner().invoke(program, ["compile", *arguments])
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    return result


def test_help_shows_each_example_on_a_line_of_its_own() -> None:
    shown = [line.strip() for line in run("--help").output.splitlines()]
    assert "nvfp4 compile --list" in shown
    assert "nvfp4 compile --all --json" in shown


# What there is ------------------------------------------------------------------------------------


def test_list_names_every_kernel_of_the_package_with_its_targets() -> None:
    lines = run("--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == sorted([*kernels.KERNELS, *SEEDS])
    for line in lines:
        targets = line.split()[1:]
        assert targets and set(targets) <= set(ARCHITECTURES)


@pytest.mark.usefixtures("own_kernels")
def test_list_can_be_json_and_for_one_target() -> None:
    table = json.loads(run("--list", "--json").stdout)
    assert table["unbounded"] == ["sm_90a"]
    assert table["multiply"] == list(ARCHITECTURES)
    assert "unbounded" not in json.loads(run("--list", "--json", "--arch", "sm_80").stdout)


# One kernel ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("own_kernels")
def test_a_kernel_shows_its_ptx_its_machine_code_and_its_resources() -> None:
    ptx = run("multiply", "--arch", "sm_100a", "--ptx").stdout
    assert ".target sm_100a" in ptx and ".entry" in ptx
    sass = run("multiply", "--arch", "sm_100a", "--sass").stdout
    assert ".target\tsm_100a" in sass and "EXIT" in sass
    line = run("multiply", "--arch", "sm_100a", "--resources").stdout
    assert line.startswith("sm_100a  multiply[FACTOR=3]: ")
    assert " registers, 0 bytes of static shared memory, 0 bytes spilled, " in line
    assert line.endswith(": ok\n")
    assert run("multiply", "--arch", "sm_100a").stdout == line


@pytest.mark.usefixtures("own_kernels")
def test_several_targets_and_json() -> None:
    out = run("multiply", "--arch", "sm_80", "--arch", "sm_90a", "--json").stdout
    first, second = json.loads(out)
    assert (first["arch"], second["arch"]) == ("sm_80", "sm_90a")
    assert first["kernel"] == "multiply[FACTOR=3]" and first["faults"] == []
    assert {"registers", "shared_bytes", "stack_bytes", "spill_bytes", "code_bytes"} <= set(first)
    shown = json.loads(run("multiply", "--arch", "sm_80", "--ptx", "--json").stdout)
    assert ".target sm_80" in shown["ptx"]


@pytest.mark.usefixtures("own_kernels")
def test_constants_can_be_chosen() -> None:
    assert "multiply[FACTOR=7]" in run("multiply", "--arch", "sm_80", "--set", "FACTOR=7").stdout
    for bad, message in (
        ("FACTOR=4", "FACTOR must be one of 2, 3, 5"), ("FACTOR", "NAME=VALUE"),
        ("OTHER=1", "NAME one of FACTOR; got 'OTHER=1'"),
    ):  # fmt: skip
        assert message in run("multiply", "--arch", "sm_80", "--set", bad, code=2).stderr


@pytest.mark.usefixtures("own_kernels")
def test_a_kernel_that_the_gate_stops_is_exit_code_one() -> None:
    out = run("in_double", "--arch", "sm_90a", code=1).stdout
    assert "computes in float64" in out


# All of them --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("own_kernels")
def test_all_builds_each_variant_for_each_target_and_says_what_failed() -> None:
    targets = ("--arch", "sm_90a", "--arch", "sm_80")
    rows = json.loads(run("--all", "--json", "--jobs", "1", *targets, code=1).stdout)
    verdicts = {(row["kernel"], row["arch"]): bool(row["faults"]) for row in rows}
    assert verdicts == {
        ("multiply[FACTOR=3]", "sm_80"): False,
        ("multiply[FACTOR=3]", "sm_90a"): False,
        ("multiply[FACTOR=5]", "sm_80"): False,
        ("multiply[FACTOR=5]", "sm_90a"): False,
        ("reverse", "sm_80"): False,
        ("reverse", "sm_90a"): False,
        ("in_double", "sm_80"): True,
        ("in_double", "sm_90a"): True,
        ("unbounded", "sm_90a"): True,
    }
    assert all(row["registers"] > 0 for row in rows)


@pytest.mark.usefixtures("own_kernels")
def test_all_counts_what_was_built_and_is_exit_code_zero_without_faults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register = ({"multiply": own.MULTIPLY}, {"multiply": own})
    monkeypatch.setattr(kernels, "_register", lambda: register)
    out = run("--all", "--jobs", "1", "--arch", "sm_89").stdout
    assert out.splitlines()[-1] == "2 built, 0 stopped by the gate"


@pytest.mark.usefixtures("own_kernels")
def test_a_kernel_that_does_not_build_is_reported_and_the_others_still_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = compiler.inspect

    def inspect(made: Any, arch: str) -> Any:
        if made.label == "reverse":
            raise RuntimeError("ptxas fatal:\n   unknown instruction")
        return real(made, arch)

    monkeypatch.setattr(compiler, "inspect", inspect)
    out = run("--all", "--jobs", "1", "--arch", "sm_80", code=1).stdout
    assert "sm_80    reverse: does not build: ptxas fatal: unknown instruction" in out
    assert out.splitlines()[-1] == "4 built, 2 stopped by the gate"


def _square(number: int) -> dict[str, Any]:
    return {"square": number**2, "process": os.getpid()}


def test_several_processes_keep_the_order() -> None:
    rows = list(_map(_square, [(n,) for n in range(8)], 2))
    assert [row["square"] for row in rows] == [n**2 for n in range(8)]
    assert os.getpid() not in {row["process"] for row in rows}


# Warming up ---------------------------------------------------------------------------------------

SHAPES = [
    {"call": "interleave_scales", "shape": [128, 16]},
    {"call": "interleave_scales", "shape": [1, 16]},
    {"call": "deinterleave_scales", "shape": [2, 128, 16]},
]


def test_a_file_of_shapes_fills_a_cache_that_a_server_then_uses(tmp_path: Path) -> None:
    shapes, out = tmp_path / "shapes.json", tmp_path / "prebuilt"
    shapes.write_text(json.dumps(SHAPES))
    arguments = ("--shapes", str(shapes), "-o", str(out), "--arch", "sm_90a", "--json")
    first = json.loads(run(*arguments, "--jobs", "2").stdout)
    assert [row["kernel"] for row in first] == ["interleave_scales", "deinterleave_scales"]
    assert [row["cached"] for row in first] == [False, False]
    again = json.loads(run(*arguments, "--jobs", "1").stdout)
    assert [row["cached"] for row in again] == [True, True]
    # The server: its own cache is empty, and it must not compile.
    needed = warm.programs(warm.read_shapes(shapes), "sm_90a")
    server = Cache([tmp_path / "own", out])
    assert all(server.find(made, "sm_90a") is not None for made in needed)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "is not JSON"),
        ('{"call": "quantize"}', "must have a list of calls"),
        ('[{"call": "nothing"}]', "call 1: call must be one of quantize, .*; got 'nothing'"),
        ('[{"call": "dequantize", "format": "nvfp4"}]', "call 1: dequantize needs shape"),
        ('[{"call": "interleave_scales", "shape": [1, 1], "m": 1}]', "takes shape; got 'm'"),
        ('[{"call": "quantize", "format": "fp3", "shape": [1, 16]}]', "fp3"),
        ('[{"call": "quantize", "format": "nvfp4", "shape": [1, 17]}]', r"in the call \{.call"),
    ],
)
def test_a_wrong_file_of_shapes_is_one_line_that_says_where(
    content: str, message: str, tmp_path: Path
) -> None:
    shapes = tmp_path / "shapes.json"
    shapes.write_text(content)
    arguments = ("--shapes", str(shapes), "-o", str(tmp_path / "o"), "--arch", "sm_90a")
    result = run(*arguments, code=2)
    assert len(result.stderr.splitlines()) == 1
    assert re.search(message, result.stderr), result.stderr


def test_an_output_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps(SHAPES))
    out = shapes / "below a file"
    result = run("--shapes", str(shapes), "-o", str(out), "--arch", "sm_90a", code=2)
    assert "cannot write to" in result.stderr


# Mistakes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one of: KERNEL, --list, --all, --shapes FILE"),
        (("multiply", "--all"), "give one of"),
        (("nothing", "--arch", "sm_80"), "kernel must be one of multiply, .*; got 'nothing'"),
        (("multiply", "--arch", "sm_75"), "arch must be one of sm_80"),
        (("unbounded", "--arch", "sm_80"), "unbounded is made for sm_90a; got sm_80"),
        (("--list", "--ptx"), "--ptx is for one KERNEL"),
        (("--all", "--set", "A=1"), "--set is for one KERNEL"),
        (("multiply", "-o", "x"), "--shapes and -o go together"),
        (("--all", "--card", "H20"), "--card is for --shapes"),
    ],
)
@pytest.mark.usefixtures("own_kernels")
def test_a_mistake_is_one_line_and_exit_code_two(arguments: tuple[str, ...], message: str) -> None:
    if arguments[:1] == ("unbounded",):
        arguments += ("--ptx",)
    result = run(*arguments, code=2)
    assert len(result.stderr.splitlines()) == 1
    assert re.search(message, result.stderr), result.stderr


@pytest.mark.usefixtures("own_kernels")
def test_without_a_gpu_the_target_must_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from nvfp4 import driver
    from nvfp4.errors import ToolchainError

    def no_driver() -> Any:
        raise ToolchainError("no libcuda")

    monkeypatch.setattr(driver, "driver", no_driver)
    driver.device_info.cache_clear()
    assert "there is no GPU here: say --arch" in run("multiply", code=2).stderr


def test_list_imports_no_compiler() -> None:
    code = (
        "import sys\n"
        "from nvfp4.cli.main import program\n"
        "from click.testing import CliRunner\n"
        "assert CliRunner().invoke(program, ['compile', '--list']).exit_code == 0\n"
        "print([m for m in ('numba', 'llvmlite', 'cuda.core', 'cuda.bindings') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == "[]\n"
