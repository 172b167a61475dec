"""Where results go: built beside their place under another name, moved there when complete.

``OUT.partial`` is a folder with the finished files, a journal with their hashes, and a lock. A run
that is interrupted leaves it; the same command takes it up again, and checks each finished file by
its hash. OUT itself is one rename, so it is either not there or complete.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from .errors import CheckpointError, printable
from .nonfinite import NonFinite, are_counts
from .writer import TEMPORARY_SUFFIX, digest, sync_folder, write_text

__all__ = ["Output", "Record"]

JOURNAL = ".nvfp4-journal.json"
_LOCK = ".nvfp4-lock"


@dataclass(frozen=True)
class Record:
    """A finished file: its size, its SHA-256, and the bytes of each of its tensors.

    ``nonfinite`` counts, for each tensor of the source that has any, the blocks that became NaN
    (``"nan_blocks"``) and the infinite elements (``"infinite"``).
    """

    file: str
    size: int
    sha256: str
    tensors: dict[str, int]
    nonfinite: dict[str, NonFinite]


class Output:
    """The place of a result.

    Parameters
    ----------
    path : path
        A .safetensors file, or a folder.
    source : path
        What is read; the result must be neither it nor inside it.
    overwrite : bool
        Replace a result that is there, and drop an unfinished one of another plan.

    Raises
    ------
    CheckpointError
        The place is taken, is a symbolic link, or is the source.
    OSError
        It cannot be written to.
    """

    def __init__(self, path: Path, source: Path, *, overwrite: bool = False) -> None:
        if path.name in ("", ".."):
            raise CheckpointError(f"{printable(path)} must end in the result's own name")
        self.path = path
        self.single = path.suffix == ".safetensors"
        self.overwrite = overwrite
        self.partial = path.with_name(path.name + TEMPORARY_SUFFIX)
        self.records: dict[str, Record] = {}
        self._lock: IO[str] | None = None
        self._added: set[str] = set()
        for place in (path, self.partial):
            if place.is_symlink():
                raise CheckpointError(
                    f"{printable(place)} is a symbolic link (to {printable(os.readlink(place))}); "
                    "name the place itself"
                )
        if not path.parent.is_dir():
            raise CheckpointError(f"{printable(path)}: there is no folder {printable(path.parent)}")
        here, there = path.resolve(), source.resolve()
        if here == there or here in there.parents or there in here.parents:
            raise CheckpointError(
                f"{printable(path)} is the checkpoint that is read, or inside it, or around it"
            )
        if overwrite and path.is_dir():
            _check_replaceable(path)
        if os.path.lexists(path) and not overwrite:
            if path.is_dir() and not self.single and not any(path.iterdir()):
                return
            raise CheckpointError(f"{printable(path)} is there already; --overwrite replaces it")

    # --- the journal ---------------------------------------------------------------------------

    def begin(self, plan: str) -> dict[str, Record]:
        """Take the place, and return what an interrupted run of the same plan has finished.

        Raises
        ------
        CheckpointError
            Another run is at it, or the unfinished result is of another plan.
        """
        self.partial.mkdir(exist_ok=True)
        if not os.path.lexists(self.partial / _LOCK):
            self._refuse_foreign(self._read_journal())  # before a lock is put into it
        self._take_lock()
        journal = self._read_journal()
        self._refuse_foreign(journal)
        if journal is not None and journal.get("plan") != plan:
            if not self.overwrite:
                raise CheckpointError(
                    f"{printable(self.partial)} holds an unfinished result of other options or of "
                    "a checkpoint that has changed: run that command again to finish it, or "
                    "--overwrite to drop it"
                )
            journal = None
        self._plan = plan
        found = (journal or {}).get("files", {})
        for name, fields in found.items() if isinstance(found, dict) else ():
            with contextlib.suppress(TypeError, OSError):
                record = Record(file=name, **fields)
                place = self.partial / name
                if (
                    are_counts(record.nonfinite)
                    and not place.is_symlink()
                    and place.stat().st_size == record.size
                    and digest(place) == record.sha256
                ):
                    self.records[name] = record
        self._clear(keep=self.records)
        self._write_journal()
        return dict(self.records)

    def _refuse_foreign(self, journal: dict[str, Any] | None) -> None:
        """A folder without a journal may hold nothing but what a run leaves that has just begun."""
        if journal is not None:
            return
        strange = sorted(p.name for p in self.partial.iterdir() if not _is_ours(p.name))
        if strange:
            raise CheckpointError(
                f"{printable(self.partial)} is needed for the result in the making, and holds "
                f"something else ({printable(strange[0])})"
            )

    def _take_lock(self) -> None:
        import fcntl

        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        self._lock = os.fdopen(os.open(self.partial / _LOCK, flags, 0o666), "w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            self._lock = None
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise CheckpointError(
                    f"another run is writing {printable(self.path)} (it holds "
                    f"{printable(self.partial)})"
                ) from error
            raise

    def _read_journal(self) -> dict[str, Any] | None:
        try:
            value = json.loads((self.partial / JOURNAL).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def _write_journal(self) -> None:
        files = {name: asdict(r) for name, r in sorted(self.records.items())}
        for fields in files.values():
            del fields["file"]
        write_text(self.partial / JOURNAL, json.dumps({"plan": self._plan, "files": files}))

    def finished(self, record: Record) -> None:
        """Note a file that is complete."""
        self.records[record.file] = record
        self._write_journal()

    def _clear(self, keep: Iterable[str]) -> None:
        """Remove whatever is in the place and is not to be kept."""
        keep = {*keep, JOURNAL, _LOCK}
        for item in self.partial.iterdir():
            if item.name in keep and not item.is_symlink():
                continue
            if item.is_dir() and not item.is_symlink():
                shutil.rmtree(item)
            else:
                item.unlink()

    # --- the end -------------------------------------------------------------------------------

    def add_text(self, name: str, text: str) -> None:
        """A small file of the result; not kept for a later run."""
        write_text(self.partial / name, text)
        self._added.add(name)

    def add_copies(self, sources: Mapping[str, Path]) -> None:
        """Copies of files: relative name -> file."""
        for name, source in sources.items():
            place = self.partial / name
            place.parent.mkdir(parents=True, exist_ok=True)
            with open(source, "rb") as old, open(place, "xb") as new:
                shutil.copyfileobj(old, new)
            self._added.add(Path(name).parts[0])

    def commit(self) -> None:
        """Give the result its name; what was there before goes when the new one is in place."""
        # A worker that was given up may have left something after the run began.
        self._clear(keep={*self.records, *self._added})
        for name in (JOURNAL, _LOCK):  # the lock outlives its name: it is on the open file
            (self.partial / name).unlink()
        if self.single:
            (file,) = self.partial.iterdir()
            if self.path.is_dir():
                raise CheckpointError(f"{printable(self.path)} is a folder")
            os.replace(file, self.path)
            self.partial.rmdir()
        elif os.path.lexists(self.path):
            old = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}.replaced")
            os.rename(self.path, old)
            os.rename(self.partial, self.path)
            if old.is_dir():
                shutil.rmtree(old)
            else:
                old.unlink()
        else:
            os.rename(self.partial, self.path)
        sync_folder(self.path.parent)
        self.release()

    def release(self) -> None:
        """Let other runs at the place."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _check_replaceable(folder: Path) -> None:
    """What --overwrite may remove: a checkpoint or an empty folder, not somebody's home."""
    cwd = Path.cwd()
    if folder.resolve() == cwd or folder.resolve() in cwd.parents:
        raise CheckpointError(f"{printable(folder)} holds the present working folder")
    if any(folder.iterdir()) and not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{printable(folder)} is no checkpoint (it holds no .safetensors file): --overwrite "
            "does not remove it"
        )


def _is_ours(name: str) -> bool:
    return name in (JOURNAL, _LOCK) or (name.startswith(".") and name.endswith(TEMPORARY_SUFFIX))
