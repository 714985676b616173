"""The admin's page of locks: it shows and frees them whatever keeps them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from django_distlock import LockNotHeld, lock, operators
from django_distlock.backends.base import BaseLockBackend
from django_distlock.operators import Row
from tests.fixtures.eventually import eventually

from .profiles import Profile, needs
from .rivals import Rival

pytestmark = needs("listing")
Rivals = Callable[..., Rival]

LIST = reverse("admin:django_distlock_heldlock_changelist")
FORCE = reverse("admin:django_distlock_heldlock_force_release")


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Client:
    """A superuser at a browser, patient with servers that have much to do."""
    monkeypatch.setattr(operators, "PATIENCE", 30.0)
    client = Client()
    client.force_login(User.objects.create_superuser(uuid.uuid4().hex))
    return client


def shown(client: Client, using: str, name: str, **query: str) -> list[Row]:
    """Return the rows of the list with this name."""
    page = client.get(LIST, {"alias": using, "q": name, "state": "all", **query})
    assert page.context["problems"] == {}
    return [row for row in page.context["page"] if row.held.name == name]


def force(client: Client, row: Row) -> list[str]:
    """Confirm the forced release of *row*, and return what the page then says."""
    page: Any = client.post(FORCE, {"lock": row.value}, follow=True)
    return [str(message) for message in page.context["messages"]]


def test_a_held_lock_is_shown_and_freed_and_its_holder_told(
    using: str, name: str, operator: Client, profile: Profile
) -> None:
    with pytest.raises(LockNotHeld), lock(name, using=using, ttl=60, purpose="a report") as lease:
        [row] = shown(operator, using, name)
        page = operator.get(reverse("admin:django_distlock_heldlock_change", args=[row.held.key]))
        told = force(operator, row)

        assert lease.lost  # one in another process is told at its next renewal
        assert told == ["1 lock was released."]
        with lock(name, using=using, timeout=50 * profile.tick):
            pass
    [entry] = LogEntry.objects.filter(object_id=row.held.key)

    assert (row.held.state, row.aliases[0]) == ("held", using)
    assert str(row.held.holder) in page.content.decode()
    assert str(lease.fencing_token or "-") in page.content.decode()
    assert entry.object_repr == name
    assert f"“{using}”: held by {lease.holder}" in entry.change_message


@needs("typical")
def test_the_next_holder_is_not_freed(
    using: str, name: str, operator: Client, rival: Rivals
) -> None:
    seen, after = rival(), rival()
    seen.takes()
    [row] = shown(operator, using, name)
    seen.leaves()
    after.takes()

    [told] = force(operator, row)

    assert "not released: the holder that was shown does not hold it any more." in told
    assert after.holds
    assert not LogEntry.objects.filter(object_id=row.held.key)


@needs("lists_readers", "typical")
def test_each_reader_is_shown_and_one_alone_is_freed(
    using: str, name: str, operator: Client, backend: BaseLockBackend, rival: Rivals
) -> None:
    one, two = rival(shared=True), rival(shared=True)
    one.takes()
    two.takes()
    rows = shown(operator, using, name)

    told = force(operator, rows[0])

    assert [row.state for row in rows] == ["held, shared"] * 2
    assert told == ["1 lock was released."]
    eventually(lambda: len(shown(operator, using, name)) == 1, 20, "one of them is gone")
    assert [one.holds, two.holds].count(True) == 1
