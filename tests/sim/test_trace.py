"""The timeline of a run: what each warp did, in order, as a file that Perfetto opens."""

from __future__ import annotations

import json

import nvfp4
from nvfp4.sim import Machine, cuda, this_thread


def body():
    thread = this_thread()
    done = thread.block.state
    if thread.linear == 0:
        thread.machine.issue("copy 16 bytes", lambda: done.setdefault("copied", 1), engine="copy")
    cuda.syncthreads()
    cuda.syncwarp()
    thread.wait_until(lambda: "copied" in done, "the copy")


def trace_of(schedule="round_robin"):
    machine = Machine("sm_90a", schedule, trace=True)
    machine.run(body, 2, 64, name="example")
    return machine.trace


def test_barriers_warp_operations_and_copies_are_recorded_in_order():
    trace = trace_of()
    first = [event for event in trace.events if event[0] == "example block (0, 0, 0)"]
    assert {track for _, track, *_ in first} == {"warp 0", "warp 1"}
    names = [name for _, track, name, *_ in first if track == "warp 0" and name != "run"]
    assert names == ["barrier 0", "syncwarp"]
    steps = [start for _, _, _, start, _, _ in first]
    assert steps == sorted(steps)
    copies = [event for event in trace.events if event[1] == "copy"]
    assert [event[2] for event in copies] == ["copy 16 bytes"] * 2
    for _, _, _, start, duration, _ in copies:
        barrier = next(event for event in first if event[2] == "barrier 0")
        assert start > 0
        assert duration >= 1
        del barrier
    # In round-robin a copy takes as long as it can: until nothing else can run.
    assert copies[0][3] + copies[0][4] > max(event[3] for event in first if event[2] == "syncwarp")


def test_the_same_schedule_gives_the_same_trace():
    assert trace_of(3).events == trace_of(3).events
    assert trace_of(3).events != trace_of(4).events


def test_the_file_is_chromes_trace_format(tmp_path):
    path = tmp_path / "trace.json"
    with nvfp4.simulate(trace=path) as machine:
        machine.run(body, 2, 64, name="example")
    records = json.loads(path.read_text())["traceEvents"]
    names = {record["args"]["name"] for record in records if record["ph"] == "M"}
    assert {
        "example block (0, 0, 0)",
        "example block (1, 0, 0)",
        "warp 0",
        "warp 1",
        "copy",
    } <= names
    for record in records:
        assert record["ph"] in "MXi"
        assert {"name", "pid", "tid"} <= record.keys()
        if record["ph"] == "X":
            assert record["dur"] > 0
    assert any(record["name"] == "barrier 0" for record in records)


def test_without_trace_there_is_none_and_tracing_changes_nothing():
    order = []

    def log():
        order.append(this_thread().linear)
        cuda.syncthreads()
        order.append(this_thread().linear)

    runs = []
    for trace in (None, False, True):
        machine = Machine("sm_90a", 9, trace=trace)
        machine.run(log, 1, 64)
        assert (machine.trace is None) is (not trace)
        runs.append(order.copy())
        order.clear()
    assert runs[0] == runs[1] == runs[2]
