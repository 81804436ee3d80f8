"""FairLock: a lock that a thread in a loop of taking and giving back does not keep from the others.

Python's own locks go to whoever asks first after a release, and the releasing thread asks first nearly always. Here
whoever waits holds a turnstile that the next one to ask, the releaser included, has to pass first.

Invariant: a thread that has reached the turnstile gets the lock before any thread takes it twice. It belongs to its
process: a child that was forked while a thread had it would wait for ever, so there it is refused.
"""

from __future__ import annotations

import os
import threading


class FairLock:
    """A context manager; reentrant. RuntimeError in another process."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._turnstile = threading.Lock()
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    @property
    def is_mine(self) -> bool:
        """Whether this thread has it."""
        return self._owner == threading.get_ident()  # only this thread could make them equal

    def __enter__(self) -> None:
        if self.process != os.getpid():
            raise RuntimeError("this LLM belongs to the process that was forked; make one in each process")
        if not self.is_mine:
            with self._turnstile:
                self._lock.acquire()
            self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            self._lock.release()
