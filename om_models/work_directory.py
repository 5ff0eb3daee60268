"""What a conversion has finished, kept when it fails: the next one of the same kind goes on there.

Beside the output, while it is being made and after a failure:

    .NAME.work-xxxxxxxxxxxx/   the letters are a digest of source, options and compiler
        rtcache-convert.lock   locked as long as a run works here
        export/                the export, whole if its `export.json` is there
        compiled/              each `.om` that is finished, and external weights

Everything is moved to its place when it is whole. A conversion that succeeds removes what is kept
for its output.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from om_models.staging import LOCK_NAME, parents_of
from runtime_cache.errors import BundleError

#: The export's last file; by it an export is known to be whole.
DRAFT_NAME = "export.json"
_KEY_LETTERS = 12


@dataclass(frozen=True)
class WorkDirectory:
    """A place to work in, of one run at a time.

    Attributes:
        root: for files that are not whole yet.
    """

    root: Path

    @property
    def export(self) -> Path:
        """Where the export lies, or is to be moved to."""
        return self.root / "export"

    @property
    def compiled(self) -> Path:
        """Where finished `.om` files are."""
        return self.root / "compiled"

    @property
    def has_export(self) -> bool:
        """Whether an export is there, whole."""
        return (self.export / DRAFT_NAME).is_file()

    def is_in_use(self) -> bool:
        """Whether a run works here."""
        with suppress(OSError), (self.root / LOCK_NAME).open("rb+") as lock:
            return not _try_lock(lock.fileno())
        return False

    def contents(self) -> list[str]:
        """What is worth keeping, by name."""
        oms = sorted(path.name for path in self.compiled.glob("*.om"))
        return [*(["the export"] if self.has_export else []), *oms]


def work_key(*parts: object) -> str:
    """The digest of what makes a conversion, from values that JSON can say."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_KEY_LETTERS]


def fingerprint(source: str) -> list[object]:
    """What of a source says that it is still the same: names, sizes and times, not contents."""
    path = Path(source)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(file.name, file.stat()) for file in files if file.is_file()]
    return [str(path.resolve()), *((n, s.st_size, s.st_mtime_ns) for n, s in stats)]


@contextmanager
def work_directory(output: Path, key: str, *, is_kept: bool) -> Iterator[WorkDirectory]:
    """The work directory of a conversion, with what an earlier run of the same key has finished.

    Removed when the block ends without an error, with all that is kept for the same output.

    Args:
        is_kept: after an error, keep what is finished; otherwise nothing stays.

    Raises:
        BundleError: another run works there.
    """
    output = output.resolve()
    with parents_of(output):
        _remove_unlocked([work for work in _all_for(output) if not work.contents()])
        work = WorkDirectory(output.parent / f".{output.name}.work-{key}")
        work.root.mkdir(exist_ok=True)
        with (work.root / LOCK_NAME).open("wb") as lock:
            if not _try_lock(lock.fileno()):
                raise BundleError(f"the same conversion runs already; it works in {work.root}")
            try:
                _remove_unfinished(work)
                yield work
            except BaseException:
                _remove_unfinished(work)
                if not (is_kept and work.contents()):
                    shutil.rmtree(work.root, ignore_errors=True)
                raise
            shutil.rmtree(work.root, ignore_errors=True)
    remove_kept(output)


def kept_for(output: Path) -> list[WorkDirectory]:
    """Work directories of an output in which something is kept and nobody works."""
    return [w for w in _all_for(output.resolve()) if w.contents() and not w.is_in_use()]


def remove_kept(output: Path) -> None:
    """Remove what is kept for an output; what another run works in stays."""
    _remove_unlocked(_all_for(output.resolve()))


def _all_for(output: Path) -> list[WorkDirectory]:
    pattern = f".{glob.escape(output.name)}.work-{'[0-9a-f]' * _KEY_LETTERS}"
    return [WorkDirectory(path) for path in sorted(output.parent.glob(pattern))]


def _remove_unlocked(works: Iterable[WorkDirectory]) -> None:
    for work in works:
        with suppress(OSError), (work.root / LOCK_NAME).open("rb+") as lock:
            if _try_lock(lock.fileno()):
                shutil.rmtree(work.root, ignore_errors=True)


def _remove_unfinished(work: WorkDirectory) -> None:
    """Remove what is not at its place: a run was killed, or has failed, while it wrote."""
    places = {work.compiled, work.root / LOCK_NAME}
    if work.has_export:
        places.add(work.export)
    for path in set(work.root.iterdir()) - places:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _try_lock(descriptor: int) -> bool:
    """Whether the lock is had; where there are no locks, as on some network disks, it is."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def link_or_copy(source: Path, target: Path) -> None:
    """Give a finished file a second place; it costs no room where the disk can link."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
