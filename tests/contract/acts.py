"""What other processes do in the tests: run by the fixture `child`, talking with say() and hear()."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from django_distlock import Lease, LockError, lock, locks
from django_distlock.conf import read_alias, read_settings
from tests.fixtures.child import end_in_full, hear_word, say
from tests.fixtures.eventually import eventually, never

from .faults import faulty_version_of, once

#: Seconds between reading a balance and writing it: the work that a lock is held for.
WORK = 0.001
#: Digits of a balance in a file.
WIDTH = 8


def hold(name: str, **terms: Any) -> None:
    """Hold the lock until told to leave."""
    began = time.monotonic()
    with lock(name, **terms) as lease:
        say("held", began=began, at=time.monotonic(), token=lease.fencing_token)
        hear_word("leave")


def stand_in_line(name: str, using: str) -> None:
    """Wait for a lock that somebody else holds, and tell when the server knows of it."""
    watched = faulty_version_of(locks[using], read_alias(using, read_settings()[using]))
    watched.notice("enqueue", partial(say, "queued"))
    locks.replace(using, watched)
    lock(name, using=using, timeout=None).acquire()


def stand_in_lines(names: list[str], using: str, **terms: Any) -> None:
    """Wait for one lock after the other; tell when the server knows of it, and when it is held."""
    watched = faulty_version_of(locks[using], read_alias(using, read_settings()[using]))
    locks.replace(using, watched)
    for name in names:
        hear_word("go")
        watched.notice("enqueue", once(partial(say, "queued")))
        with lock(name, using=using, timeout=30, **terms):
            say("held", at=time.monotonic())


def hold_again_and_again(name: str, using: str, seconds: float) -> None:
    """Hold the lock for so many seconds each time; tell when it is held for the first time."""
    told = once(partial(say, "held"))
    while True:
        with lock(name, using=using, timeout=None):
            told()
            time.sleep(seconds)


def wake_up_late(name: str, **terms: Any) -> dict[str, str]:
    """Hold the lock; once told to go on, tell what the first check and the release say."""
    lease = lock(name, **terms).acquire()
    assert lease
    say("held")
    hear_word("go on")
    return {"check": _outcome_of(lease.check), "release": _outcome_of(lease.release)}


def leave_without_a_word(name: str, **terms: Any) -> int | None:
    """End while the lock is held."""
    end_in_full()
    lease = lock(name, **terms).acquire()
    assert lease
    return lease.fencing_token


def leave_with_daemons(names: list[str], **terms: Any) -> None:
    """End while a daemon thread for each lock takes and releases it again and again."""
    end_in_full()
    rounds = Counter[str]()

    def work(name: str) -> None:
        while True:
            with lock(name, **terms):
                rounds[name] += 1

    for name in names:
        threading.Thread(target=work, args=(name,), daemon=True).start()
    eventually(lambda: all(rounds[name] > 2 for name in names), 30)


def raise_balance(name: str, path: str, rounds: int, **terms: Any) -> None:
    """Read a number in a file, work, write it back one higher; again and again."""
    with lock(f"{name}:another", **terms):
        say("ready")  # and connected
    hear_word("go")
    with Path(path).open("r+b", buffering=0) as file:
        for _ in range(rounds):
            with lock(name, **terms) as lease:
                at = WIDTH * (lease.place or 0)
                balance = int(os.pread(file.fileno(), WIDTH, at))
                time.sleep(WORK)
                os.pwrite(file.fileno(), b"%0*d" % (WIDTH, balance + 1), at)


def attach(text: str) -> int | None:
    """Take over a lease, hold it until told to leave, and release it."""
    with Lease.attach(text) as lease:
        say("attached", token=lease.fencing_token, name=lease.name)
        hear_word("leave")
    return lease.fencing_token


def fork_inside(name: str, *, by_c: bool, **terms: Any) -> bool:
    """Fork while the lock is held; the forked child leaves the block and ends like any process.

    *by_c*: as uWSGI does it, which tells Python nothing.
    """
    with lock(name, **terms) as lease:
        # A child by C waits for ever for a thread that was just about to run, and is not there.
        never(lambda: lease.lost, 0.2)
        pid = ctypes.PyDLL(None).fork() if by_c else os.fork()
        # Python 3.13 crashes now and then when a new thread gets the stack of one that it believes to live.
        is_fragile = by_c and sys.version_info >= (3, 13)
        if pid == 0:
            faulthandler.enable()
            say(
                "forked",
                held=lease.held,
                check=_outcome_of(lease.check),
                extend=_outcome_of(lease.extend),
                release=_outcome_of(lease.release),
                taken=lock(name, **{**terms, "timeout": 0.2}).acquire() is not None,
                renewed=is_fragile or _is_renewed(f"{name}:own", **terms),
            )
            atexit._run_exitfuncs()
            # No thread of the parent's is here to be waited for.
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        assert status == 0, f"the forked child ended with wait status {status}"
        say("alone")
        hear_word("leave")
        lease.extend()
        return lease.held


def _is_renewed(name: str, **terms: Any) -> bool:
    with lock(name, **{**terms, "ttl": 2}) as lease:
        deadline = lease.deadline
        return eventually(lambda: lease.deadline > deadline)


def _outcome_of(call: Any) -> str:
    try:
        call()
    except LockError as error:
        return type(error).__name__
    return "done"


def wait_in_threads(name: str, using: str, number: int) -> None:
    """Have so many threads wait for the lock until the process is killed."""
    for _ in range(number):
        wait = lock(name, using=using, timeout=None).acquire
        threading.Thread(target=wait, daemon=True).start()
    hear_word("never")
