"""FairLock: a lock that a thread in a loop of taking and giving back does not keep from the others.

Python's own locks go to whoever asks first after a release, and the releasing thread asks first nearly always. Here
whoever waits holds a turnstile that the next one to ask, the releaser included, has to pass first.

Invariant: a thread that has reached the turnstile gets the lock before any thread takes it twice.
"""

from __future__ import annotations

import threading


class FairLock:
    """A context manager; reentrant."""

    def __init__(self) -> None:
        self._turnstile = threading.Lock()
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        thread = threading.get_ident()
        if self._owner != thread:  # only this thread could make them equal
            with self._turnstile:
                self._lock.acquire()
            self._owner = thread
        self._depth += 1

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            self._lock.release()
