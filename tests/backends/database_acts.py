"""What other processes do in the tests of locks in a database; see tests.fixtures.child."""

from __future__ import annotations

import threading

import freezegun
from django.conf import settings

from django_distlock import LockBackendError, lock, locks
from tests.fixtures.child import hear_word, say
from tests.fixtures.eventually import eventually


def give_up_requests(names: list[str]) -> None:
    """Connect; when told to go on, ask for each lock, and count those that a server leaves without an answer."""
    options = {"using": "postgres", "max_connections": 4, "io_timeout": 0.3}
    settings.DISTLOCK = {"leases": {"OPTIONS": options}}
    with lock(names[0], using="leases"):
        pass
    say("connected")
    hear_word("go on")
    given_up = 0
    for name in names:
        try:
            lock(name, using="leases", timeout=0, ttl=5).acquire()
        except LockBackendError:
            given_up += 1
    say("gave up", requests=given_up)
    hear_word("leave")
    locks.close()


def wait_while_the_clock_stands_still(name: str) -> None:
    """Wait for the lock, which somebody has, while freezegun stops the clock; then see that nobody listens for it."""
    with freezegun.freeze_time("2030-01-01"):
        lease = lock(name, using="postgres", timeout=2).acquire()
    locks.close()
    eventually(lambda: "distlock-listen" not in str(threading.enumerate()), 10)
    say("none listens", lease=lease is not None)
