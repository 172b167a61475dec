"""Several processes give the bytes of one, also when one of them is killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nvfp4.checkpoint import CheckpointError, quantize
from nvfp4.checkpoint.cluster import run_on_cluster
from tests.checkpoint.helpers import ROOT, command, contents, write_folder

# Makes a worker slow enough to be caught in the middle of a file. Read by each new interpreter.
SLOW = """
import os, time
if os.environ.get("NVFP4_TEST_SLOW"):
    from nvfp4.checkpoint import numeric
    numeric.CpuBackend.chunk = 1 << 15
    real = numeric.CpuBackend.quantize
    def quantize(self, *a):
        time.sleep(0.02)
        return real(self, *a)
    numeric.CpuBackend.quantize = quantize
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(4)
    arrays = {
        f"layers.{i}.weight": rng.standard_normal((256, 1024)).astype("float32") for i in range(6)
    }
    arrays["layers.3.weight"][5, :2] = np.nan, np.inf
    return write_folder(tmp_path_factory.mktemp("cluster") / "in", arrays, shards=6)


@pytest.fixture(scope="module")
def whole(source: Path) -> dict[str, bytes]:
    quantize(source, source.parent / "whole", device="cpu")
    return contents(source.parent / "whole")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A scheduler and two slow workers, each a process: the address, and the workers' pids."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SLOW)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path / "site")]),
        "NVFP4_TEST_SLOW": "1",
    }
    options = ["--host", "127.0.0.1", "--no-dashboard"]
    address_file = tmp_path / "scheduler.json"
    scheduler = subprocess.Popen(
        [
            *[sys.executable, "-c", "from distributed.cli.dask_scheduler import main; main()"],
            *options, "--port", "0", "--scheduler-file", str(address_file),
        ],
        env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    workers: list[subprocess.Popen[bytes]] = []
    try:
        deadline = time.monotonic() + 30
        while not address_file.exists() or not address_file.read_text():
            assert time.monotonic() < deadline, "the scheduler did not start"
            time.sleep(0.05)
        address = json.loads(address_file.read_text())["address"]
        for name in ("w0", "w1"):
            command_line = [
                *[sys.executable, "-c", "from distributed.cli.dask_worker import main; main()"],
                *[address, *options, "--no-nanny", "--nthreads", "1", "--name", name],
                *["--local-directory", str(tmp_path / name)],
            ]
            worker = subprocess.Popen(
                command_line, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
            workers.append(worker)
        (tmp_path / "pids").write_text(" ".join(str(w.pid) for w in workers))
        yield address, tmp_path / "pids"
    finally:
        for process in [*workers, scheduler]:
            process.kill()
            process.wait()


def test_two_workers_give_the_bytes_of_one_process(
    source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    done = command("quantize", source, "-o", tmp_path / "out", "--workers", 2, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "out") == whole
    note = "note: layers.3.weight: 1 of 16384 blocks became NaN"
    assert note in done.stdout  # what a worker has seen
    assert done.stdout.count("note: ") == 1


def test_a_worker_that_is_killed_loses_nothing(
    source: Path, whole: dict[str, bytes], tmp_path: Path, cluster: tuple[str, Path]
) -> None:
    address, pids = cluster
    victim = int(pids.read_text().split()[0])
    partial = tmp_path / "out.partial"
    killed = threading.Event()

    def in_progress() -> list[Path]:
        return [p for p in partial.glob(".*.partial") if f".{victim}-" in p.name]

    def kill_in_the_middle() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if partial.is_dir() and in_progress():
                os.kill(victim, signal.SIGKILL)
                killed.set()
                return
            time.sleep(0.002)

    killer = threading.Thread(target=kill_in_the_middle)
    killer.start()
    done = command("quantize", source, "-o", tmp_path / "out", "--scheduler", address,
                   "--device", "cpu", "--json")  # fmt: skip
    killer.join()
    assert killed.is_set(), "no file of this worker was seen in the making"
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "out") == whole
    assert not partial.exists()


@pytest.mark.slow  # waits for the time that a scheduler is given to answer
def test_no_scheduler_at_the_address_is_one_line(source: Path, tmp_path: Path) -> None:
    done = command("quantize", source, "-o", tmp_path / "o", "--scheduler", "127.0.0.1:1")
    assert done.returncode == 2
    assert "no dask scheduler at 127.0.0.1:1" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_failed_connection_leaves_nothing_and_harms_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import distributed

    def refuse(*args: object, **more: object) -> None:
        raise OSError("timed out")

    monkeypatch.setattr(distributed, "Client", refuse)
    on_cluster = run_on_cluster(scheduler="127.0.0.1:1")
    with pytest.raises(CheckpointError, match=r"no dask scheduler at 127\.0\.0\.1:1: timed out"):
        quantize(source, tmp_path / "out", run_all=on_cluster)
    assert list(tmp_path.iterdir()) == []
    # What is wrong with the place is said first: nobody waits for a cluster to hear it.
    with pytest.raises(CheckpointError, match="is the checkpoint that is read"):
        quantize(source, source, run_all=on_cluster)


def test_an_error_in_a_worker_is_the_error_of_the_run(tmp_path: Path) -> None:
    arrays = {"a.weight": np.full((16, 32), 1e-37, "float32"), "b.weight": np.ones((16, 32), "f4")}
    source = write_folder(tmp_path / "in", arrays, shards=2)
    done = command("quantize", source, "-o", tmp_path / "out", "--convention", "modelopt",
                   "--workers", 1, "--device", "cpu")  # fmt: skip
    assert done.returncode == 2
    assert "beyond what a tensor scale" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{}, {"workers": 1, "scheduler": "x"}, {"workers": 0}])
def test_workers_and_scheduler_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="workers"):
        run_on_cluster(**options)  # type: ignore[arg-type]


def test_both_options_at_once_are_a_mistake(source: Path, tmp_path: Path) -> None:
    done = command("quantize", source, "-o", tmp_path / "o", "--workers", 1, "--scheduler", "x")
    assert done.returncode == 2
    assert "exclude one another" in done.stderr
    assert issubclass(CheckpointError, ValueError)
