from __future__ import annotations

import importlib.util

from nvfp4.bench import golden_cpu


def test_the_benchmark_prints_our_time_and_whether_there_is_a_peer(capsys):
    assert golden_cpu.main(["--rows", "8", "--columns", "64", "--repeat", "2"]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0].startswith("nvfp4 of 8 x 64 float32")
    assert [line.split("  ")[0].strip() for line in lines[3:]] == [
        "no tensor scale",
        "tensor scale",
    ]
    assert all(" ms (" in line for line in lines[3:])
    has_peer = importlib.util.find_spec("torchao") is not None
    assert ("torchao is not installed" in printed) != has_peer
    assert ("ratio" in printed) == has_peer
