"""Plans and their execution: a plan is a list of output files, each a list of steps.

Files are independent: each can be made by any process of any machine that sees the folders, again
and again, with the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .. import __version__
from .container import byte_count
from .errors import CheckpointError, printable
from .model import CONFIG, INDEX, MODELOPT_CONFIG, Checkpoint, open_checkpoint
from .nonfinite import nonfinite_notes
from .numeric import backend
from .output import Output, Record
from .steps import Context, CopyStep, QuantizeStep, Step
from .writer import TensorWriter

__all__ = ["FileJob", "Plan", "Result", "copy_step", "execute", "layout_files", "run_file"]

Report = Callable[[int], None]


@dataclass(frozen=True)
class FileJob:
    """One output file: everything that a worker must know."""

    source: str
    folder: str
    file: str
    steps: tuple[Step, ...]
    metadata: tuple[tuple[str, str], ...]
    device: str = "cpu"

    @property
    def nbytes(self) -> int:
        """Source bytes that are read."""
        return sum(step.nbytes for step in self.steps)


@dataclass
class Plan:
    """All of a result.

    Attributes
    ----------
    files : list of (file name, steps, metadata)
    configs : dict of str to str
        Further files of a folder: name -> text.
    notes : list of str
        What the user should know: where something is not lossless, or may load differently.
    """

    files: list[tuple[str, tuple[Step, ...], dict[str, str]]]
    configs: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """What came out.

    Attributes
    ----------
    path : Path
    files : tuple of Record
    kept : tuple of str
        Files that an earlier, interrupted run had finished.
    source_bytes, bytes : int
        Bytes of the tensors that were read, and of the files that were written.
    notes : tuple of str
        What the user should know, of the plan and of NaN and infinity in the source; of these each
        record has all counts.
    """

    path: Path
    files: tuple[Record, ...]
    kept: tuple[str, ...]
    source_bytes: int
    bytes: int
    notes: tuple[str, ...] = ()


def copy_step(model: Checkpoint, name: str) -> CopyStep:
    """The step that passes a tensor through."""
    entry = model.entries[name]
    return CopyStep(name, entry.dtype, entry.shape, entry.nbytes)


def layout_files(
    model: Checkpoint, out: Path, steps: Sequence[tuple[str, Step]]
) -> list[tuple[str, tuple[Step, ...], dict[str, str]]]:
    """Output files for steps, given with the source file that each belongs to.

    A folder gets one file for each of the source; a single file gets everything.

    Raises
    ------
    CheckpointError
        Two steps would write the same tensor.
    """
    seen: set[str] = set()
    for _, step in steps:
        for name in step.outputs():
            if name in seen:
                raise CheckpointError(
                    f"two tensors of the result would be called {printable(name)}"
                )
            seen.add(name)
    if out.suffix == ".safetensors":
        metadata: dict[str, str] = {}
        for file in model.files.values():
            metadata.update(file.metadata)
        groups = {out.name: [step for _, step in steps]}
        return [(out.name, tuple(groups[out.name]), metadata or {"format": "pt"})]
    by_file: dict[str, list[Step]] = {name: [] for name in model.files}
    for file_name, step in steps:
        by_file.setdefault(file_name, []).append(step)
    single = len(by_file) == 1
    result = []
    for file_name, some in by_file.items():
        name = "model.safetensors" if single else file_name
        source = model.files.get(file_name)
        # Loaders refuse a file that does not name its framework.
        result.append((name, tuple(some), (source.metadata if source else {}) or {"format": "pt"}))
    return result


def run_file(job: FileJob, report: Report | None = None, device_index: int = 0) -> Record:
    """Make one output file; returns when it is complete under its name.

    Raises
    ------
    CheckpointError, OSError
        Then nothing is left under the name.
    """
    tensors = {n: t for step in job.steps for n, t in step.outputs().items()}
    with open_checkpoint(job.source) as model:
        writer = TensorWriter(Path(job.folder) / job.file, tensors, dict(job.metadata))
        with writer:
            context = Context(
                model, writer, backend(job.device, device_index), report or (lambda _: None)
            )
            for step in job.steps:
                step.run(context)
            nonfinite = context.nonfinite
            written = writer.commit()
    sizes = {name: byte_count(*tensor) for name, tensor in sorted(tensors.items())}
    return Record(job.file, written.size, written.sha256, sizes, nonfinite)


def _fingerprint(model: Checkpoint, plan: Plan) -> str:
    """Changes when the source, the options or this package's version do."""
    sources = []
    for name, file in sorted(model.files.items()):
        stat = os.stat(file.path)
        sources.append([name, stat.st_size, stat.st_mtime_ns])
    if not model.files:
        stat = os.stat(model.path)
        sources.append([model.path.name, stat.st_size, stat.st_mtime_ns])
    described = [
        __version__,
        sources,
        [
            [name, [[type(s).__name__, asdict(s)] for s in steps], m]
            for name, steps, m in plan.files
        ],
    ]
    text = json.dumps(described, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


# Weights in other containers; whoever reads the result must not find the originals in it.
_WEIGHTS = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".ot",
    ".npz", ".index",
}  # fmt: skip


def companions(model: Checkpoint) -> dict[str, Path]:
    """The other files of a checkpoint's folder that belong beside its weights: a tokeniser, say."""
    found: dict[str, Path] = {}
    if not model.path.is_dir():
        return found
    for folder, folders, names in os.walk(model.path):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for name in sorted(names):
            path = Path(folder) / name
            relative = path.relative_to(model.path).as_posix()
            if (
                name.startswith(".")
                or path.suffix in _WEIGHTS
                or relative in (CONFIG, INDEX, MODELOPT_CONFIG)
                or name.endswith(".index.json")
                or not path.is_file()
            ):
                continue
            found[relative] = path
    return found


def execute(
    model: Checkpoint,
    plan: Plan,
    out: Path,
    *,
    overwrite: bool = False,
    device: str = "cpu",
    run_all: Callable[[list[FileJob], Callable[[Record], None], Report], None] | None = None,
    report: Report | None = None,
) -> Result:
    """Carry a plan out, or take up what an interrupted run of it has left.

    Parameters
    ----------
    model : Checkpoint
    plan : Plan
    out : Path
        A .safetensors file or a folder.
    overwrite : bool
    device : {"auto", "cpu", "cuda"}
    run_all : callable, optional
        Runs the jobs, in any order and place, and gives each record as its file is complete; by
        default one after another in this process. If it has a method ``connected``, a context
        manager, that is entered before anything is written.
    report : callable, optional
        Gets the source bytes as they are done.

    Raises
    ------
    CheckpointError, OSError
        The result is then not there; what is finished of it is kept for the next run.
    """
    place = Output(out, model.path, overwrite=overwrite)
    report = report or (lambda _: None)
    connected = getattr(run_all, "connected", contextlib.nullcontext)
    with connected(), place:
        kept = place.begin(_fingerprint(model, plan))
        jobs = [
            FileJob(
                str(model.path.resolve()), str(place.partial.resolve()), name, steps,
                tuple(metadata.items()), device,
            )
            for name, steps, metadata in plan.files
        ]  # fmt: skip
        for job in jobs:
            if job.file in kept:
                report(job.nbytes)
        left = [job for job in jobs if job.file not in kept]
        (run_all or _one_by_one)(left, place.finished, report)
        if not place.single:
            place.add_copies(companions(model))
            if len(jobs) > 1:
                place.add_text(INDEX, _index(place.records.values()))
            for name, text in plan.configs.items():
                place.add_text(name, text)
        place.commit()
    records = tuple(place.records[job.file] for job in jobs)
    return Result(
        out,
        records,
        tuple(kept),
        sum(job.nbytes for job in jobs),
        sum(record.size for record in records),
        (*plan.notes, *_nonfinite_notes(plan, records)),
    )


def _nonfinite_notes(plan: Plan, records: Iterable[Record]) -> list[str]:
    found = {name: counts for record in records for name, counts in record.nonfinite.items()}
    weights = {
        step.name: (step.scheme.format, step.shape)
        for _, steps, _ in plan.files
        for step in steps
        if isinstance(step, QuantizeStep)
    }
    # A journal is a file that anybody can have changed.
    return nonfinite_notes({name: found[name] for name in found if name in weights}, weights)


def _one_by_one(jobs: list[FileJob], finished: Callable[[Record], None], report: Report) -> None:
    for job in jobs:
        finished(run_file(job, report))


def _index(records: Iterable[Record]) -> str:
    sizes: dict[str, int] = {}
    files: dict[str, str] = {}
    for record in records:
        sizes.update(record.tensors)
        files.update(dict.fromkeys(record.tensors, record.file))
    index = {
        "metadata": {"total_size": sum(sizes.values())},
        "weight_map": dict(sorted(files.items())),
    }
    return json.dumps(index, indent=2, ensure_ascii=False) + "\n"


def config_text(config: Mapping[str, Any]) -> str:
    """A configuration as its file holds it."""
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def elements(shape: Sequence[int]) -> int:
    """Product of the axes."""
    return math.prod(shape)
