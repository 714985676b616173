"""What comes from outside is escaped and cut before it is logged, raised or listed: on every backend."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from django_distlock import LockError, LockNotAcquired, lock, lock_all
from django_distlock.exceptions import LockBackendError
from django_distlock.ground.naming import LONGEST_NAME
from tests.fixtures.eventually import eventually

from .crew import taken
from .faults import Faulty
from .profiles import lacks, needs

Logged = Callable[[], list[str]]

#: Controls, line breaks, bidi marks, a tag, a lone surrogate: a terminal or a reader is led astray by each.
MARKS = (
    "\x00\x07\x08\n\r\x1b[2J\x7f\x85\x9b2J\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d"
    "\u202e\u2066\u2067\u2068\u2069\ufeff\U000e0041\ud800"
)
HOSTILE = f"{MARKS}CRITICAL django.security: {{}} %s %(name)s "
#: Bytes of a line: a name, who holds it, and some words.
LONGEST_LINE = 2_000


def assert_harmless(texts: list[str]) -> None:
    assert texts
    for text in texts:
        assert text.isprintable(), ascii(text)
        assert len(text.encode()) < LONGEST_LINE


@pytest.fixture
def hostile(name: str) -> str:
    """A name as long as it may be."""
    return f"{name}{HOSTILE}".ljust(LONGEST_NAME, "\u202e")


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Logged:
    """Tells what the package has logged so far, at all levels."""
    caplog.set_level(logging.DEBUG, "django_distlock")
    return lambda: [r.getMessage() for r in caplog.records if r.name.startswith("django_distlock")]


@pytest.fixture(autouse=True)
def hostile_thread() -> Iterator[None]:
    thread = threading.current_thread()
    before, thread.name = thread.name, HOSTILE
    yield
    thread.name = before


def test_a_hostile_name_and_purpose_harm_no_log_and_no_error(
    using: str, hostile: str, logged: Logged, faulty: Faulty
) -> None:
    taken = lock(hostile, using=using, purpose=HOSTILE * 100)
    with taken as lease:
        said = [repr(taken), repr(lease), str(lease.holder), repr(lock_all(hostile, using=using))]
        with pytest.raises(LockNotAcquired) as busy:
            lock(hostile, using=using, reentrant=False).enter(0)
        said += [str(busy.value), str(busy.value.holder)]
    with pytest.raises(LockError) as released:
        lease.release()
    faulty.fail("try_acquire")
    with pytest.raises(LockBackendError) as failed, lock(hostile, using=using):
        pass

    assert lease.holder.thread.startswith(r"\x00\x07")
    assert_harmless([*said, str(released.value), str(failed.value), *logged()])


@needs("listing")
def test_a_hostile_holder_is_listed_and_forced_free_harmlessly(
    using: str, hostile: str, logged: Logged, faulty: Faulty
) -> None:
    lease = taken(hostile, using=using, purpose=HOSTILE)

    [held] = [each for each in faulty.held() if each.key == lease.request.key]
    assert faulty.force_release(held.key, held.owner_digest)
    with pytest.raises(LockError) as lost:
        lease.release()

    assert held.name.isprintable()
    assert held.holder
    assert held.holder.purpose.startswith(r"\x00\x07")
    assert_harmless([str(held.holder), str(lost.value), *logged()])


@lacks("whole_seconds")
def test_a_hostile_lease_that_cannot_be_renewed_is_told_of_harmlessly(
    using: str, hostile: str, tick: float, logged: Logged, faulty: Faulty
) -> None:
    faulty.fail("extend")
    lease = taken(hostile, using=using, ttl=4 * tick)

    eventually(lambda: any("was lost" in text for text in logged()), 15)
    with pytest.raises(LockError) as lost:
        lease.release()

    assert_harmless([str(lost.value), *logged()])
