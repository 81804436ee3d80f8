"""Files that are written while an engine lives, or at its end: which place on the disk a name stands for.

Invariant: it is settled once, when the engine is made. A later change of the working directory moves no file, links are
followed instead of replaced, and what is no regular file (a device, a pipe) is never replaced by one.
"""

from __future__ import annotations

import os
from pathlib import Path


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
