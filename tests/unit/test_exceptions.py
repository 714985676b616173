"""The tree of errors: who catches what, what they say, and that they survive the way to another process."""

from __future__ import annotations

import copy
import pickle
from datetime import UTC, datetime
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError

import django_distlock
from django_distlock import (
    InvalidLockBackend,
    LockBackendError,
    LockDeadlock,
    LockError,
    LockLost,
    LockNotAcquired,
    LockNotHeld,
    LockNotOwned,
    LockOutcomeUnknown,
    NotSupported,
    ReleasedBeforeCommit,
    SnapshotBeforeLock,
    StaleFencingToken,
)
from django_distlock.exceptions import first_line
from django_distlock.ground.holder import Holder

HOLDER = Holder("db1", 4711, "MainThread", "Task-1", "GET /fee")
UNTIL = datetime(2031, 5, 4, 12, 5, 30, tzinfo=UTC)
LATER = "a later holder has claimed this data"

#: What an error says, and the error.
SAID: dict[str, Exception] = {
    f"Lock 'fee:1' is held by {HOLDER}: gave up after 5 s; its lease has 2.5 s left.": LockNotAcquired(
        "fee:1", 5.0, HOLDER, 2.5
    ),
    "Lock 'fee:1' is held: gave up after 0 s.": LockNotAcquired("fee:1", 0.0),
    "Lock 'fee:1' is held: gave up after 0.32 s; its lease has 44 minutes left.": LockNotAcquired(
        "fee:1", 0.316, None, 2660
    ),
    "Lock 'fee:1' is reserved until 2031-05-04 12:05 (min_hold): gave up after 0 s.": LockNotAcquired(
        "fee:1", 0.0, None, 60, UNTIL
    ),
    "Lock 'fee:1' is not held: it was not acquired, or is already released.": LockNotHeld("fee:1"),
    "Lock 'fee:1' was lost: forced.": LockLost("fee:1", "forced"),
    "Lock 'fee:1' was lost: somebody else holds it now.": LockNotOwned("fee:1"),
    "DISTLOCK['redis']: no majority. a: timeout. b: refused.": LockBackendError(
        "redis", "no majority", {"a": "timeout", "b": "refused"}
    ),
    f"Lock 'fee:1', fencing token 7: {LATER} (its fence is 7).": StaleFencingToken(
        "fee:1", 7, LATER, 7
    ),
    f"Lock 'fee:1', fencing token 7: {LATER}.": StaleFencingToken("fee:1", 7, LATER),
    "DISTLOCK['cache'] does not support fencing tokens. Use another backend.": NotSupported(
        "cache", "fencing tokens", "Use another backend."
    ),
    "DISTLOCK['cache'] does not support listing.": NotSupported("cache", "listing"),
    "Waiting for lock 'fee:1' would never end: it waits for itself.": LockDeadlock(
        "fee:1", "it waits for itself"
    ),
    "Lock 'fee:1' was released before the transaction around it on 'shop' was committed: the next "
    'holder reads old data. Release or detach() it after the commit: leave out release="at_exit", '
    'or use release="on_commit".': ReleasedBeforeCommit("fee:1", "shop"),
    "A lock was to be acquired in a transaction on 'shop' that has read before: at its isolation level "
    "it reads old data while it holds the lock. Acquire the lock before anything is read, or outside "
    "atomic(), or use the isolation level READ COMMITTED.": SnapshotBeforeLock("", "shop"),
}
ERRORS = [
    *SAID.values(),
    LockError("something"),
    LockBackendError("redis", "no answer"),
    LockOutcomeUnknown("redis", "the reply was lost"),
    StaleFencingToken("fee:1", 7, LATER, 7_200_000_007),
    ReleasedBeforeCommit("", "default"),
    SnapshotBeforeLock("a", "default"),
    InvalidLockBackend("DISTLOCK['x']: unknown key 'Y'."),
]
EACH = pytest.mark.parametrize(
    "error", ERRORS, ids=lambda error: f"{type(error).__name__}-{len(str(error))}"
)


@pytest.mark.parametrize(
    ("fence", "ahead"), [(7_200_000_007, "2 hours"), (12_300_007, "12 s"), (8, "0 s")]
)
def test_a_fence_ahead_asks_what_was_changed(fence: int, ahead: str) -> None:
    changed = "was the backend, its server or the data changed?"

    error = StaleFencingToken("a", 7, LATER, fence)

    assert f"(its fence is {fence}, ahead of ours by {ahead}: {changed} See https://" in str(error)
    assert (Path(__file__).parents[2] / "docs/howto/change-the-backend.md").exists()


def test_every_error_is_tried_here() -> None:
    public = {getattr(django_distlock, name) for name in django_distlock.__all__}
    errors = {each for each in public if isinstance(each, type) and issubclass(each, Exception)}

    assert {type(error) for error in ERRORS} == errors


@EACH
@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
def test_an_error_survives_pickle_as_it_is(error: Exception, protocol: int) -> None:
    restored = pickle.loads(pickle.dumps(error, protocol))

    assert type(restored) is type(error)
    assert str(restored) == str(error)
    assert restored.args == error.args
    assert vars(restored) == vars(error)


@EACH
def test_an_error_survives_copy_with_its_notes(error: Exception) -> None:
    noted = copy.copy(error)
    noted.add_note("django_distlock: the lock was lost")

    again = pickle.loads(pickle.dumps(noted))

    assert again.__notes__ == ["django_distlock: the lock was lost"]
    assert not hasattr(error, "__notes__")


@pytest.mark.parametrize("serializer", ["json", "pickle"])
@EACH
def test_an_error_survives_the_result_backends_of_celery(error: Exception, serializer: str) -> None:
    base = pytest.importorskip("celery.backends.base")
    app = pytest.importorskip("celery").Celery(set_as_current=False)
    backend = base.Backend(app=app, serializer=serializer, accept=[serializer])

    stored = backend.encode(backend.prepare_exception(error))
    restored = backend.exception_to_python(backend.decode(stored))

    assert type(restored) is type(error)
    assert str(restored) == str(error)
    assert vars(restored) == vars(error)


CAUGHT: list[tuple[type[Exception], set[type[Exception]]]] = [
    (LockNotAcquired, {LockError, TimeoutError, CommandError}),
    (LockNotHeld, {LockError, RuntimeError}),
    (LockLost, {LockNotHeld, LockError, RuntimeError}),
    (LockNotOwned, {LockLost, LockNotHeld, LockError, RuntimeError}),
    (LockBackendError, {LockError}),
    (LockOutcomeUnknown, {LockBackendError, LockError}),
    (LockDeadlock, {LockError}),
    (StaleFencingToken, {LockError}),
    (NotSupported, {LockError}),
    (ReleasedBeforeCommit, {LockError, RuntimeWarning}),
    (SnapshotBeforeLock, {LockError, RuntimeWarning}),
    (InvalidLockBackend, {ImproperlyConfigured}),
]


@pytest.mark.parametrize(("error", "caught_by"), CAUGHT)
def test_an_error_is_caught_by_its_kind_and_by_no_other(
    error: type[Exception], caught_by: set[type[Exception]]
) -> None:
    kinds = {*(type(each) for each in ERRORS), *(kind for _, kinds in CAUGHT for kind in kinds)}

    assert {kind for kind in kinds if issubclass(error, kind)} == caught_by | {error}


@pytest.mark.parametrize(("text", "error"), SAID.items())
def test_an_error_says_what_and_which_and_what_now(text: str, error: Exception) -> None:
    assert str(error) == text


def test_an_error_for_another_caller_has_the_same_causes() -> None:
    error = LockBackendError("redis", "no answer", {"server 1": "timeout"})
    error.__cause__ = TimeoutError("of the driver")

    copied = error.copy()

    assert str(copied) == str(error)
    assert copied.__cause__ is error.__cause__
    assert copied is not error


def test_an_error_in_a_log_is_its_sentence() -> None:
    error = LockNotAcquired("fee:1", 5.0, HOLDER, 2.5)

    assert repr(error) == f"LockNotAcquired({str(error)!r})"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("no answer in 5 s.\nHint: start it."), "no answer in 5 s"),
        (ValueError("\n  refused \n"), "refused"),
        (ValueError("a\x1b[31m"), r"a\x1b[31m"),
        (ValueError(), "ValueError"),
    ],
)
def test_an_error_is_told_in_another_by_its_first_line(error: Exception, line: str) -> None:
    assert first_line(error) == line
