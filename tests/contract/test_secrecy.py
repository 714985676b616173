"""The owner of a lease is a secret: whoever knows it can give the lock back."""

from __future__ import annotations

import logging
import pickle
import secrets
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
from pytest_django.fixtures import Settings

from django_distlock import LockError, LockNotAcquired, lock
from django_distlock.backends.base import BaseLockBackend
from tests.fixtures.eventually import eventually

from .crew import start, taken
from .faults import Faulty
from .profiles import Profile, lacks, needs
from .rivals import Rival

#: Whatever limits the time for an answer.
IMPATIENT = {"io_timeout": 0.5, "server_timeout": 0.5}


@needs("typical")
def test_every_holding_has_an_owner_of_its_own(using: str, name: str) -> None:
    owners = set()
    for _ in range(5):
        with lock(name, using=using) as lease:
            owners.add(lease.request.owner)

    assert len(owners) == 5
    # 128 random bits, as hex.
    assert {len(owner) for owner in owners} == {32}


@needs("typical")
def test_it_is_shown_nowhere(using: str, name: str) -> None:
    with lock(name, using=using) as lease:
        shown = (
            f"{lease} {lease!r} {lease.request} {lease.request!r} {lease.holder} {lease.holder!r}"
        )

    assert lease.request.owner not in shown
    assert name in shown


def test_it_is_not_told_to_who_finds_the_lock_busy(using: str, name: str, holder: Rival) -> None:
    with pytest.raises(LockNotAcquired) as caught, lock(name, using=using, timeout=0):
        pass

    told = f"{caught.value} {caught.value!r} {vars(caught.value)}".encode()
    assert holder.request.owner.encode() not in told + pickle.dumps(caught.value)


@needs("listing")
def test_it_is_not_told_to_operators(holder: Rival, backend: BaseLockBackend) -> None:
    listed = list(backend.held())

    assert listed
    assert holder.request.owner not in repr(listed)


@lacks("whole_seconds")
@needs("leased")
def test_it_is_not_logged(
    faulty: Faulty, using: str, name: str, tick: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    faulty.fail("extend")
    lost = taken(name, using=using, ttl=4 * tick)
    eventually(lambda: lost.lost)
    with lock(name, using=using) as lease:
        assert not lock(name, using=using, timeout=0, reentrant=False).acquire()

    # Statements of the database drivers are theirs to log or not: Django's only with DEBUG.
    logged = [r.getMessage() for r in caplog.records if r.name.startswith("django_distlock")]

    assert logged
    assert not any(
        owner in text for text in logged for owner in (lost.request.owner, lease.request.owner)
    )


@needs("cross_process")
def test_it_is_not_in_the_frames_of_an_error(
    profile: Profile,
    using: str,
    name: str,
    request: pytest.FixtureRequest,
    settings: Settings,
    *,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Django's error mails and Sentry show the variables of all frames."""
    options = profile.settings["OPTIONS"]
    options = {**options, **{key: IMPATIENT[key] for key in IMPATIENT.keys() & options.keys()}}
    settings.DISTLOCK = {using: {**profile.settings, "OPTIONS": options}}
    lease = taken(name, using=using, ttl=20)
    owners = {str(lease.request.owner)}

    made = secrets.token_hex

    def token_hex(size: int) -> str:
        text = made(size)
        if size == 16:
            owners.add(text)
        return text

    monkeypatch.setattr("secrets.token_hex", token_hex)
    monkeypatch.setattr("django_distlock.backends.base.token_hex", token_hex)

    assert str(lease.request.owner) not in repr(lease.request.owner)
    with hung(*map(request.getfixturevalue, profile.fixtures)):
        taking = start(lambda: [*_shown(partial(_take, f"{name}:other", using))])
        shown = [[*_shown(act)] for act in (lease.extend, lease.release)]
        shown.append(taking.result(30))

    assert len(owners) > 1
    assert all(shown) or not profile.needs_server
    assert not [text for texts in shown for text in texts if any(map(text.count, owners))]


def _take(name: str, using: str) -> None:
    with lock(name, using=using, timeout=0):
        pass


@contextmanager
def hung(*servers: Any) -> Iterator[None]:
    """Have these servers, or what they are made of, answer nobody for a moment."""
    with ExitStack() as stack:
        for server in servers:
            if isinstance(server, list):
                stack.enter_context(hung(*server))
            elif hasattr(server, "pause"):
                server.pause()
                stack.callback(server.resume)
            else:
                stack.enter_context(
                    hung(*getattr(server, "members", getattr(server, "servers", ())))
                )
        yield


def _shown(act: Callable[[], object]) -> Iterator[str]:
    """Return what the report of the error of *act* shows, if it raises one, as texts."""
    try:
        act()
    except LockError as error:
        pending: list[BaseException | None] = [error]
        while pending:
            if (found := pending.pop()) is not None:
                # As Django and Sentry do.
                pending.append(found.__cause__ if found.__suppress_context__ else found.__context__)
                for frame, _ in traceback.walk_tb(found.__traceback__):
                    code = frame.f_code
                    if code is not _shown.__code__:
                        for variable, value in frame.f_locals.items():
                            yield f"{code.co_filename}:{code.co_name}: {variable} = {value!r}"
