"""Journal: a results file that is its own record of what is done.

    line\n line\n line\n li        killed here: the next run cuts the torn line and goes on behind the whole ones

Results are appended, each as a whole line, and synced to the disk every SYNC_SECONDS. NAME.lock is locked while the
file is open. A compressed results file (.gz, .zst) is written plain as NAME.partial, and compressed when the batch is
complete. A NAME that is a link stands for what it points to.

Invariant: whole lines are never changed, and a file that does not look like results (or like a lock) is never touched.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from nanoapc.batch_io import MAGIC, compress, decompress
from nanoapc.engine.output_file import replace_file, sync_folder

SYNC_SECONDS = 5.0
HEAD = b'{"id": "batch_req_'
"""How every result line begins."""


class OutputLost(OSError):
    """Somebody has removed, replaced or cut the results file while a run wrote to it."""


class Journal:
    """One results file, open and locked; path "-" is standard output. A pipe or a device is only written to.

    Raises:
        OSError: it cannot be opened. ValueError: another run has it, or what it holds are no results.
    """

    def __init__(self, path: str):
        if path == "-" and sys.stdout is None:
            raise ValueError("standard output is closed; give the name of a file instead of -")
        self.is_stream = path == "-" or (os.path.exists(path) and not os.path.isfile(path))
        self._final, self.path, lock = output_files(path)
        self._suffix = Path(path).suffix
        self._size = 0
        self._next_sync = 0.0
        with ExitStack() as stack:
            if not self.is_stream:
                stack.enter_context(_locked(lock))
            self._is_new = not self.is_stream and not self.path.exists()
            if self._is_new and self._final.exists():
                _rewrite(self._final, self.path, decompress, self._suffix, path)
            target: Any = os.dup(sys.stdout.fileno()) if path == "-" else path if self.is_stream else self.path
            self._file = stack.enter_context(open(target, "ab", 0))
            self.sync()
            self._stack = stack.pop_all()

    def finished(self) -> Iterator[dict[str, Any]]:
        """The results that are there already. When they have been read, the file is ready for more."""
        if self.is_stream:
            return
        ends_whole = True
        with open(self.path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                result = _parse(line)
                if result is None and _is_torn(line, number):
                    break
                if line.strip():  # else somebody has removed a result, but not its line
                    if not _is_result(result):
                        raise ValueError(f"{self.path}, line {number}, is no result of a batch; choose another output")
                    yield result
                self._size += len(line)
                ends_whole = line.endswith(b"\n")
        self._cut()
        if not ends_whole:
            self.write(b"\n")

    def write(self, line: bytes) -> None:
        """Appends one line (with its newline). OSError: it is not there, not even in part. OutputLost: see `sync`."""
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
        """From here on, what has been written survives a power failure. OutputLost: it does not even now."""
        if not self.is_stream:
            if not self._is_in_place():
                what = "was removed, replaced or cut while the run wrote to it, so results are lost"
                raise OutputLost(f"{self.path} {what}; remove what is left of it, and run the command again")
            os.fsync(self._file.fileno())
            sync_folder(self.path)
        self._next_sync = time.monotonic() + SYNC_SECONDS

    def complete(self) -> None:
        """The batch is complete: compresses the file if its name asks for it."""
        self.sync()
        if not self.is_stream and self.path != self._final:
            _rewrite(self.path, self._final, compress, self._suffix)
            self.path.unlink()

    def _is_in_place(self) -> bool:
        """Whether the file that is open still has its name and all that was written."""
        return _has_name(self._file, self.path) and os.fstat(self._file.fileno()).st_size >= self._size

    def _cut(self) -> None:
        """Removes what stands behind the last whole line."""
        if not self.is_stream and os.fstat(self._file.fileno()).st_size > self._size:
            os.ftruncate(self._file.fileno(), self._size)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._stack:
            if not self.is_stream:
                os.fsync(self._file.fileno())
            if self._is_new and self._size == 0 and exception[0] is not None and self._is_in_place():
                self.path.unlink()  # a run that could not start leaves nothing behind


def output_files(path: str | Path) -> tuple[Path, Path, Path]:
    """(where the results of this output are in the end, where they are written, their lock); links are followed."""
    final = os.path.realpath(path)
    return Path(final), Path(f"{final}.partial" if Path(path).suffix in MAGIC else final), Path(f"{final}.lock")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock file, which is locked until the process ends, however it ends."""
    if path.exists() and (not path.is_file() or path.stat().st_size):
        raise ValueError(f"{path} is no lock file, it holds something; rename it, or choose another output")
    with open(path, "ab") as file:
        is_ours = False
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = _has_name(file, path)  # else its owner has just removed it
        if not is_ours:
            raise ValueError(f"{path.with_suffix('')} is being written by another run ({path} is locked)")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _has_name(file: IO[bytes], path: Path) -> bool:
    """Whether an open file still has its name."""
    try:
        return os.path.samefile(file.fileno(), path)
    except OSError:
        return False


def _rewrite(source: Path, target: Path, convert: Callable[..., None], *arguments: str) -> None:
    """Converts a file into another, which only those who may read the first one may read."""
    with open(source, "rb") as old, replace_file(target) as new:
        shutil.copymode(source, new.name)
        convert(old, new, *arguments)


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_result(value: Any) -> bool:
    match value:
        case {"id": str(name), "custom_id": str() | None, "response": {"body": dict()}, "error": dict() | None}:
            return name.startswith("batch_req_")
    return False


def _is_torn(line: bytes, number: int) -> bool:
    """Whether it can be a line whose writing was interrupted: its begin, or zeros after a power failure."""
    if b"\0" in line and number > 1:
        return True
    return not line.endswith(b"\n") and line[: len(HEAD)] == HEAD[: len(line)]
