"""FairLock: a lock that a thread in a loop of taking and giving back does not keep from the others.

Python's own locks go to whoever asks first after a release, and the releasing thread asks first nearly always. Here
whoever waits holds a turnstile that the next one to ask, the releaser included, has to pass first.

Invariant: a thread that has reached the turnstile gets the lock before any thread takes it twice. A signal's handler
may take it wherever it interrupts its thread. (So both are RLocks, which know their owner at any moment.)

It belongs to its process: a child that was forked while a thread had it would wait for ever, so there it is refused. A
new LLM in that child would hang as well, in torch, whose OpenMP threads are not forked with it: processes have to be
started with multiprocessing's "spawn" or "forkserver", or the child calls torch.set_num_threads(1) first.
"""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext


class FairLock:
    """A context manager; reentrant. RuntimeError in another process."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._turnstile = threading.RLock()
        self._lock = threading.RLock()

    @property
    def is_mine(self) -> bool:
        """Whether this thread has it."""
        return self._lock._is_owned()  # type: ignore[attr-defined]

    def __enter__(self) -> None:
        if self.process != os.getpid():
            raise RuntimeError(
                "this LLM belongs to the process that was forked; make one in each process, and start processes with "
                "multiprocessing's 'spawn' or 'forkserver': torch's threads are not forked, and a forked child hangs "
                "(unless it calls torch.set_num_threads(1) first)"
            )
        with nullcontext() if self.is_mine else self._turnstile:
            self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()
