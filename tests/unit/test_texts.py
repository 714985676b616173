"""Texts from outside reach people by one way: naming.printable()."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from django.core import signing
from django.http import HttpResponse
from django.test import RequestFactory

from django_distlock import (
    Lease,
    LockBackendError,
    LockDeadlock,
    LockError,
    LockLost,
    LockNotAcquired,
    LockNotHeld,
    LockNotOwned,
    NotSupported,
    ReleasedBeforeCommit,
    SnapshotBeforeLock,
    StaleFencingToken,
    current_lease,
    distributed_lock,
    lock,
    lock_all,
    transaction_lock,
)
from django_distlock.backends.cache_alias import Record
from django_distlock.backends.queue.labels import Label
from django_distlock.backends.session.occupants import Occupant
from django_distlock.engine.handover import SALT
from django_distlock.engine.values import Held
from django_distlock.ground.holder import Holder
from django_distlock.ground.naming import LONGEST_NAME, LONGEST_SHOWN, printable
from django_distlock.models import FencingCounter, LockWaiter, MethodLock
from tests.unit.conftest import own_lease

if TYPE_CHECKING:
    from django.http import HttpRequest

    from django_distlock.backends.locmem import LocMemBackend

HOSTILE = "x\nCRITICAL \x1b[2J\u202e\u2066\u200f\u061c\u2028\ud800" * 500
TOO_LONG = "x" * (LONGEST_NAME + 1)


# What it does.


@pytest.mark.parametrize("most", [110, LONGEST_SHOWN, 20_000])
@pytest.mark.parametrize("text", [HOSTILE, "\U0001f512" * 9_000, "e\u0301" * 9_000, "x" * 10**6])
def test_a_text_is_cut_to_so_many_bytes_with_no_half_character(text: str, most: int) -> None:
    shown = printable(text, most)

    assert shown.isprintable() or "\u0301" in shown
    assert most - 7 < len(shown.encode()) <= most or len(shown) >= len(text)
    assert shown.endswith("...") or len(shown) >= len(text)
    assert printable(shown, most) == shown


def test_a_text_that_fits_is_whole() -> None:
    text = "M\u00fcller \U0001f512 " + "x" * 900

    assert printable(text) == text


# What comes from servers, written by others, by older versions or by an attacker.


def test_a_holder_is_harmless_wherever_it_comes_from() -> None:
    parts: dict[str, Any] = dict.fromkeys(("host", "thread", "task", "purpose"), HOSTILE)

    for limit in (0, -1, 1001, "4", 1.5, HOSTILE):
        assert Holder.from_json(json.dumps({"pid": 1, **parts, "limit": limit})) is None
    for holder in (Holder(pid=1, **parts), Holder.from_json(json.dumps({"pid": 1, **parts}))):
        assert holder is not None
        assert str(holder).isprintable()
        assert repr(holder).isprintable()
        assert len(holder.to_json()) <= 1000  # the column of a database
        assert Holder.from_json(holder.to_json()) == holder


@pytest.mark.parametrize(
    "written",
    [
        '{"host": {"a": 1}, "pid": 1, "thread": ""}',
        '{"host": "h", "pid": "\\u001b[2J", "thread": "t"}',
        '{"host": "h", "pid": 1, "thread": null}',
        '{"host": "h", "pid": 1, "thread": "t", "of a later version": 1}',
        '{"name": 1}',
        "{}",
        "[" * 100_000,
        "[1]",
        "1",
        "null",
        "",
        "\udcff",
    ],
)
def test_what_is_no_holder_is_nobody_known(written: str) -> None:
    data = written.encode(errors="surrogateescape")

    assert Holder.from_json(written) is None
    assert Record.unpack(data).holder is None
    assert Occupant.from_json(written) is None
    assert Label.read(data) == Label("", None)


def test_what_is_listed_is_harmless() -> None:
    held = Held(HOSTILE, HOSTILE, None, None, None, "")

    assert held.name.isprintable()
    assert held.key.isprintable()
    for row in (MethodLock(description=HOSTILE), MethodLock(method_name=HOSTILE)):
        assert str(row).isprintable()
    assert str(FencingCounter(method_name=HOSTILE)).isprintable()
    assert str(LockWaiter(method_name=HOSTILE)).isprintable()


@pytest.mark.parametrize(
    "error",
    [
        LockNotAcquired(HOSTILE, 1.0, Holder(HOSTILE, 1, HOSTILE, HOSTILE, HOSTILE), 1.0),
        LockNotHeld(HOSTILE, HOSTILE),
        LockLost(HOSTILE, HOSTILE),
        LockNotOwned(HOSTILE),
        LockBackendError("redis", HOSTILE, {HOSTILE: HOSTILE}),
        LockDeadlock(HOSTILE, HOSTILE),
        StaleFencingToken(HOSTILE, 1, HOSTILE, 1),
        NotSupported("redis", HOSTILE, HOSTILE),
        ReleasedBeforeCommit(HOSTILE, "default"),
        SnapshotBeforeLock(HOSTILE, "default"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_an_error_says_is_harmless_and_short(error: LockError) -> None:
    assert str(error).isprintable()
    # A name or a problem and one or two more, each of 1 kB; a backslash of a name is shown as two.
    assert len(str(error).encode()) < 4 * LONGEST_SHOWN
    assert all(text.isprintable() for text in getattr(error, "causes", {}).values())


# Names are bounded wherever they come in.


def _attach(name: str) -> None:
    handed: dict[str, Any] = {"using": "default", "owner": "a", "token": 1, "renew": True}
    terms = {"ttl": 5.0, "shared": False, "min_hold": 0.0, "max_hold": None, "hold_on_success": 0.0}
    Lease.attach(signing.dumps({**handed, **terms, "name": name}, salt=SALT))


@pytest.mark.parametrize(
    "use",
    [
        lock,
        lambda name: lock_all("a", name),
        current_lease,
        lambda name: transaction_lock(name, using="default"),
        distributed_lock("{text}")(lambda text: text),
        lambda name: distributed_lock(name)(print),
        _attach,
    ],
    ids=["lock", "lock_all", "current_lease", "transaction_lock", "field", "template", "attach"],
)
def test_a_longer_name_is_refused_at_every_entry(
    memory: LocMemBackend, use: Callable[[str], Any]
) -> None:
    with pytest.raises(ValueError, match="10,000 characters at most, not 10,001"):
        use(TOO_LONG)


def test_the_longest_name_is_counted_in_its_normal_form(memory: LocMemBackend) -> None:
    with lock("e\u0301" * LONGEST_NAME) as lease:
        assert len(lease.name) == LONGEST_NAME


@pytest.mark.parametrize("forged", [HOSTILE, HOSTILE.replace("\ud800", "")])
def test_what_is_said_of_a_forged_text_is_harmless_and_short(
    memory: LocMemBackend, forged: str
) -> None:
    with pytest.raises(signing.BadSignature) as refused:
        Lease.attach(f"forged:{forged}")

    assert str(refused.value).isprintable()
    assert len(str(refused.value).encode()) <= LONGEST_SHOWN


# Who holds a lock, as a request, a thread or a task says it.


@distributed_lock("report")
def _report(request: HttpRequest, **fields: str) -> HttpResponse:
    return HttpResponse(f"{own_lease('report').holder}")


def test_the_path_of_a_view_is_escaped(
    memory: LocMemBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "django_distlock")
    request = RequestFactory().get("/report/x%0aCRITICAL django.security: %1b[2J/?token=secret")
    assert "\n" in request.path

    told = _report(request).content.decode()

    assert told.isprintable()
    assert r"GET /report/x\nCRITICAL django.security: \x1b[2J/" in told
    assert "secret" not in told
