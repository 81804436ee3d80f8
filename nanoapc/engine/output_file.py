"""Files that are written while an engine lives, or at its end: which place a name stands for, how a file is replaced.

Invariants: a place is settled once, when the engine is made. A later change of the working directory moves no file,
links are followed instead of replaced, and what is no regular file (a device, a pipe) is never replaced by one. A file
that is replaced is at any moment the old one or the new one, whole.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO


def output_file(argument: str, path: str) -> Path:
    """The absolute path, behind all links, of a file that an argument names and that may be written.

    Raises:
        ValueError: its folder cannot be written, or something else has that name.
    """
    place = Path(os.path.realpath(path))
    if not os.access(place.parent, os.W_OK):
        raise ValueError(f"{argument}={path!r}: there is no folder {place.parent} that can be written; make it first")
    if place.exists() and not place.is_file():
        raise ValueError(f"{argument}={path!r} is no regular file; name another")
    return place


@contextmanager
def replace_file(path: Path, mode: int = 0o666, sync: bool = True) -> Iterator[IO[bytes]]:
    """A new file to be written, which takes the place of `path` when the block has ended; after an error the old one
    stays, and nothing of the new one.

    mode: who may read and write it, less the umask. sync: it is to survive a power failure.
    """
    new = path.with_name(f"nanoapc-{secrets.token_hex(8)}.tmp")
    try:
        with open(new, "xb", opener=partial(os.open, mode=mode)) as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path)


def sync_folder(path: Path) -> None:
    """The name of this file survives a power failure, too, where its folder may be read."""
    with suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
