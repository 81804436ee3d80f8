"""FairLock: nobody waits long for it, however eagerly another thread takes it again."""

from __future__ import annotations

import threading
import time

from nanoapc.fair_lock import FairLock


def test_a_waiting_thread_gets_the_lock_between_two_turns_of_an_eager_one() -> None:
    lock, done = FairLock(), threading.Event()
    turns = [0]

    def eager() -> None:
        while not done.is_set():
            with lock:
                turns[0] += 1
                time.sleep(0.001)

    thread = threading.Thread(target=eager)
    thread.start()
    try:
        waits = []
        for _ in range(40):
            time.sleep(0.0003)
            before = turns[0]
            with lock:
                waits.append(turns[0] - before)
    finally:
        done.set()
        thread.join()
    # Until it reaches the turnstile a thread may be off the processor for a while, but not again and again.
    # (With one of Python's own locks it waits for tens of turns.)
    assert sorted(waits)[30] <= 2


def test_a_thread_may_take_it_again_and_others_wait_until_it_is_given_back_as_often() -> None:
    lock, inside = FairLock(), []

    def take() -> None:
        with lock:
            inside.append("other")

    with lock:
        with lock:
            thread = threading.Thread(target=take)
            thread.start()
            inside.append("twice")
        thread.join(timeout=0.05)
        inside.append("once")
        assert "other" not in inside
    thread.join()
    assert inside == ["twice", "once", "other"]
