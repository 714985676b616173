"""The admin's page of locks: it shows and frees them whatever keeps them."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client
from django.urls import reverse

from django_distlock import LockNotHeld, lock, operators
from tests.integration.staff import FORCE, LIST, superuser

from .profiles import Profile, needs

pytestmark = needs("listing")


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Client:
    """A superuser at a browser, patient with servers that have much to do."""
    monkeypatch.setattr(operators, "PATIENCE", 30.0)
    return superuser()


def test_a_held_lock_is_shown_and_freed_and_its_holder_told(
    using: str, name: str, operator: Client, profile: Profile
) -> None:
    with pytest.raises(LockNotHeld), lock(name, using=using, ttl=60, purpose="a report") as lease:
        listed = operator.get(LIST, {"alias": using, "q": name, "state": "all"}).context
        [row] = [row for row in listed["page"] if row.held.name == name]
        page = operator.get(reverse("admin:django_distlock_heldlock_change", args=[row.held.key]))
        done: Any = operator.post(FORCE, {"lock": row.value}, follow=True)

        assert lease.lost  # one in another process is told at its next renewal
        assert [str(message) for message in done.context["messages"]] == ["1 lock was released."]
        with lock(name, using=using, timeout=50 * profile.tick):
            pass
    [entry] = LogEntry.objects.filter(object_id=row.held.key)

    assert listed["problems"] == {}
    assert (row.held.state, row.aliases[0]) == ("held", using)
    assert str(row.held.holder) in page.content.decode()
    assert str(lease.fencing_token or "-") in page.content.decode()
    assert entry.object_repr == name
    assert f"“{using}”: held by {lease.holder}" in entry.change_message
