"""FairLock: nobody waits long for it, however eagerly another thread takes it again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from nanoapc import fair_lock
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


def test_a_signals_handler_may_take_it_while_its_thread_waits_for_it() -> None:
    program = f"""
import os, runpy, signal, threading
lock, held, done, taken = runpy.run_path({fair_lock.__file__!r})["FairLock"](), threading.Event(), threading.Event(), []
def hold():
    with lock:
        held.set()
        done.wait()
def handle(*signal):
    done.set()
    with lock:
        taken.append("handler")
thread = threading.Thread(target=hold)
thread.start()
held.wait()
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.2)
with lock:
    taken.append("thread")
thread.join()
print(*taken, lock.is_mine)
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20)
    assert process.stdout == "handler thread False\n", process.stderr


def test_another_process_is_told_how_to_get_its_own() -> None:
    lock = FairLock()
    lock.process = os.getppid()
    with pytest.raises(RuntimeError, match=r"make one in each process.*'spawn' or 'forkserver'.*set_num_threads\(1\)"):
        lock.__enter__()
