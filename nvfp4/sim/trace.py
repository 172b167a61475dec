"""A timeline of a simulated run, in Chrome's trace format (opens in Perfetto and in chrome://tracing).

Time is counted in turns of the scheduler, one a microsecond of the picture: it shows order, not
speed.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .block import Warp
    from .thread import Thread
    from .waits import Barrier


class Trace:
    """What each warp and each engine did, in order.

    Attributes
    ----------
    events
        (process, track, name, start, duration, arguments): the process is a block, the track a warp
        or an engine.
    """

    def __init__(self) -> None:
        self.events: list[tuple[str, str, str, int, int, dict[str, Any]]] = []
        self.step = 0
        self.kernel = ""

    def instruction(self, thread: Thread, name: str, **arguments: Any) -> None:
        """Record an instruction of a thread's warp, now."""
        self._add(thread.warp, name, self.step, 0, arguments)

    def barrier(self, barrier: Barrier, threads: list[Thread]) -> None:
        """Record that a barrier is complete, in the warps of the threads that waited for it."""
        for warp in {thread.warp: None for thread in threads}:
            self._add(warp, f"barrier {barrier.id}", self.step, 0, {"threads": barrier.arrived})

    def turn(self, warp: Warp, lanes: int) -> None:
        """Record that a warp ran, for one step."""
        self._add(warp, "run", self.step, 1, {"lanes": lanes})

    def span(self, process: str, track: str, name: str, start: int, **arguments: Any) -> None:
        """Record something that began at `start` and ends now, such as a copy."""
        self.events.append((process, track, name, start, max(self.step - start, 1), arguments))

    def _add(
        self, warp: Warp, name: str, start: int, duration: int, arguments: dict[str, Any]
    ) -> None:
        process = f"{self.kernel} block {tuple(warp.block.block_index)}"
        self.events.append((process, f"warp {warp.index}", name, start, duration, arguments))

    def to_json(self) -> dict[str, Any]:
        """Return the trace as a JSON object of Chrome's trace event format."""
        processes: dict[str, int] = {}
        tracks: dict[tuple[str, str], int] = {}
        records: list[dict[str, Any]] = []
        for process, track, name, start, duration, arguments in self.events:
            if process not in processes:
                processes[process] = len(processes) + 1
                records.append(_metadata("process_name", process, processes[process], 0))
            pid = processes[process]
            if (process, track) not in tracks:
                tracks[process, track] = len(tracks) + 1
                records.append(_metadata("thread_name", track, pid, tracks[process, track]))
            record: dict[str, Any] = {"name": name, "pid": pid, "tid": tracks[process, track]}
            record |= {"ts": start, "args": arguments}
            record |= {"ph": "X", "dur": duration} if duration else {"ph": "i", "s": "t"}
            records.append(record)
        return {"traceEvents": records, "displayTimeUnit": "ms"}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a file that Perfetto opens."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_json(), file)


def _metadata(kind: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
