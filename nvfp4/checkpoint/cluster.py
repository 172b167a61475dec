"""Output files made by several processes or machines, through dask.distributed.

A job is plain data and its file does not depend on who makes it, so the scheduler may give it to
another worker when one dies. Workers write to the result's folder themselves: they must see it, and
the source, under the same paths.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import ToolchainError
from .errors import CheckpointError, printable
from .jobs import FileJob, Report, run_file
from .output import Record

__all__ = ["run_on_cluster"]


def run_on_cluster(
    workers: int | None = None, scheduler: str | None = None
) -> Callable[[list[FileJob], Callable[[Record], None], Report], None]:
    """A way to run jobs for `nvfp4.checkpoint.jobs.execute`.

    Parameters
    ----------
    workers : int, optional
        Processes of a cluster on this machine, which ends with the run.
    scheduler : str, optional
        Address of a cluster that is there ("tcp://host:8786"); nvfp4 must be installed on it.

    Raises
    ------
    ValueError
        Neither or both are given, or `workers` is less than 1.
    ToolchainError
        dask.distributed is missing.
    """
    if (workers is None) == (scheduler is None):
        raise ValueError("give either workers or scheduler")
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1; got {workers}")
    try:
        import distributed  # noqa: F401
    except ImportError as error:
        raise ToolchainError(
            "several workers need dask.distributed: install nvfp4[cluster]"
        ) from error

    return _OnCluster(workers, scheduler)


class _OnCluster:
    """Runs jobs on a cluster; `connected` finds it before anything is written for them."""

    def __init__(self, workers: int | None, scheduler: str | None) -> None:
        self._where = workers, scheduler
        self._found: Any = None

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Connect to a scheduler that is there; processes of our own start with the first job."""
        workers, scheduler = self._where
        if scheduler is None:
            yield
            return
        with _client(workers, scheduler) as self._found:
            try:
                yield
            finally:
                self._found = None

    def __call__(
        self, jobs: list[FileJob], finished: Callable[[Record], None], report: Report
    ) -> None:
        if not jobs:
            return
        if self._found is not None:
            _run(self._found, jobs, finished, report)
            return
        with _client(*self._where) as client:
            _run(client, jobs, finished, report)


@contextmanager
def _client(workers: int | None, scheduler: str | None) -> Iterator[Any]:
    import distributed

    # The package has annotations in part: calls of the rest count as untyped.
    Client: Any = distributed.Client
    LocalCluster: Any = distributed.LocalCluster
    if scheduler is not None:
        try:
            client = Client(scheduler, timeout="10s", set_as_default=False)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"no dask scheduler at {printable(scheduler)}: {error}"
            ) from error
        with client:
            yield client
        return
    with (
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            dashboard_address=None,
            memory_limit=0,  # tensors stream: there is nothing to spill
            silence_logs=40,
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def _run(
    client: Any, jobs: list[FileJob], finished: Callable[[Record], None], report: Report
) -> None:
    import distributed

    as_completed: Any = distributed.as_completed
    # The longest first: the end is then not spent waiting for one large file.
    ordered = sorted(jobs, key=lambda job: -job.nbytes)
    futures = {
        client.submit(make, job, pure=False, retries=0, key=f"nvfp4-{os.getpid()}-{job.file}"): job
        for job in ordered
    }
    try:
        for future in as_completed(futures, loop=client.loop):
            finished(future.result())
            report(futures[future].nbytes)
    finally:
        client.cancel(list(futures), force=True)


def make(job: FileJob) -> Record:
    """Make a file, on the GPU of this worker where there is one; runs on the worker."""
    from distributed import get_worker

    name = get_worker().name
    return run_file(job, device_index=name if isinstance(name, int) else 0)
