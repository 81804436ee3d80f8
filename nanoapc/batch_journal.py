"""Journal: a results file that is its own record of what is done.

    line\n line\n line\n li        killed here: the next run cuts the torn line and goes on behind the whole ones

Results are appended, each as a whole line, and synced to the disk every SYNC_SECONDS. NAME.lock is locked while the
file is open. A compressed results file (.gz, .zst) is written plain as NAME.partial, and compressed when the batch is
complete.

Invariant: whole lines are never changed, and a file that does not look like results is never touched.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from nanoapc.batch_io import MAGIC, compress, decompress

SYNC_SECONDS = 5.0
HEAD = b'{"id": "batch_req_'
"""How every result line begins."""


class Journal:
    """One results file, open and locked; path "-" is standard output. A pipe or a device is only written to.

    Raises:
        OSError: it cannot be opened. ValueError: another run has it, or what it holds are no results.
    """

    def __init__(self, path: str):
        suffix = Path(path).suffix
        self._final = Path(path) if suffix in MAGIC else None
        self.path = Path(f"{path}.partial" if self._final else path)
        self._is_stream = path == "-" or (self.path.exists() and not stat.S_ISREG(self.path.stat().st_mode))
        self._is_new = path != "-" and not os.path.lexists(self.path)
        self._size = 0
        self._next_sync = 0.0
        with ExitStack() as stack:
            if not self._is_stream:
                stack.enter_context(_locked(Path(f"{path}.lock")))
            if self._final is not None and self._final.exists() and not self.path.exists():
                _rewrite(self._final, self.path, partial(decompress, suffix=suffix, name=path))
            target: Any = os.dup(sys.stdout.fileno()) if path == "-" else self.path
            self._file = stack.enter_context(open(target, "ab", 0))
            self.sync()
            self._stack = stack.pop_all()

    def finished(self) -> Iterator[dict[str, Any]]:
        """The results that are there already. When they have been read, the file is ready for more."""
        if self._is_stream:
            return
        ends_whole = True
        with open(self.path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                result = _parse(line)
                if result is None and not _is_torn(line, number):
                    raise ValueError(f"{self.path}, line {number}, is no result of a batch; choose another output")
                if result is None:
                    break
                self._size += len(line)
                ends_whole = line.endswith(b"\n")
                yield result
        self._cut()
        if not ends_whole:
            self.write(b"\n")

    def write(self, line: bytes) -> None:
        """Appends one line (with its newline). OSError: it is not there, not even in part."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except BaseException:
            self._cut()
            raise
        self._size += len(line)
        if time.monotonic() >= self._next_sync:
            self.sync()

    def sync(self) -> None:
        """From here on, what has been written survives a power failure."""
        if not self._is_stream:
            os.fsync(self._file.fileno())
            _sync_folder(self.path)
        self._next_sync = time.monotonic() + SYNC_SECONDS

    def complete(self) -> None:
        """The batch is complete: compresses the file if its name asks for it."""
        self.sync()
        if self._final is not None:
            _rewrite(self.path, self._final, partial(compress, suffix=self._final.suffix))
            self.path.unlink()

    def _cut(self) -> None:
        """Removes what stands behind the last whole line."""
        if not self._is_stream and os.fstat(self._file.fileno()).st_size > self._size:
            os.ftruncate(self._file.fileno(), self._size)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._stack:
            self.sync()
            if self._is_new and self._size == 0 and exception[0] is not None:
                self.path.unlink()  # a run that could not start leaves nothing behind


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock file, which is locked until the process ends, however it ends."""
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.fstat(file.fileno()), os.stat(path))  # else its owner has just removed it
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        if not is_ours:
            raise ValueError(f"{path.with_suffix('')} is being written by another run ({path} is locked)")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _rewrite(source: Path, target: Path, copy: Callable[[IO[bytes], IO[bytes]], None]) -> None:
    """Copies a file to another, which appears when it is whole."""
    temporary = Path(f"{target}.tmp")
    try:
        with open(source, "rb") as old, open(temporary, "wb") as new:
            copy(old, new)
            new.flush()
            os.fsync(new.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, target)
    _sync_folder(target)


def _sync_folder(path: Path) -> None:
    """The file's name survives a power failure, too."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        result = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_result = isinstance(result, dict) and str(result.get("id")).startswith("batch_req_") and "custom_id" in result
    return result if is_result else None


def _is_torn(line: bytes, number: int) -> bool:
    """Whether it can be a line whose writing was interrupted: its begin, or zeros after a power failure."""
    if b"\0" in line and number > 1:
        return True
    return not line.endswith(b"\n") and line[: len(HEAD)] == HEAD[: len(line)]
