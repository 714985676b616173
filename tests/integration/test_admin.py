"""The admin of the locks: what it shows and to whom, and the forced release."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote as urlquote

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connections, transaction
from django.test import Client

from django_distlock import (
    Lease,
    LockNotAcquired,
    LockNotHeld,
    StaleFencingToken,
    admin,
    lock,
    locks,
    operators,
)
from django_distlock.backends.database import records
from django_distlock.backends.database.backend import DatabaseBackend
from django_distlock.engine.values import Busy, Grant, Held, LockState, digest
from django_distlock.ground.holder import Holder
from django_distlock.ground.naming import server_key
from django_distlock.models import FencingCounter, MethodLock
from django_distlock.signals import lock_forced
from tests.contract.crew import listening
from tests.fixtures import tenancy
from tests.fixtures.tenancy import tenant

from .lock_rows import HOLDER, put, put_waiter, reread
from .staff import FORCE, LIST, addresses, client_of, detail_url, superuser

if TYPE_CHECKING:
    from pytest_django.fixtures import Settings

HOSTILE = "<script>alert('1')</script>/../?q=ü&"
#: Written into the table by somebody else: a terminal or a reader is led astray by each.
MARKS = "\n\x1b[2J\u202e\u2066"
Page = Any


@pytest.fixture(autouse=True)
def urls(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.ROOT_URLCONF = addresses()
    monkeypatch.setattr(operators, "PATIENCE", 30.0)  # with a machine that has much to do


def listed(client: Client, **query: str) -> Page:
    return client.get(LIST, query)


def rows_of(page: Page) -> dict[str, Held]:
    """Return the locks of the list by their keys."""
    return {row.held.key: row.held for row in page.context["page"]}


def cells(page: Page, row_name: str) -> list[str]:
    """Return the text of each cell in the row of the list that begins with this name."""
    rows = re.findall(r"<tr>.*?</tr>", page.text, re.DOTALL)
    [row] = [row for row in rows if f">{row_name}</a>" in row]
    found = re.findall(r"<t[hd][^>]* data-label=.*?</t[hd]>", row, re.DOTALL)
    return [re.sub(r"<.*?>", "", cell).strip() for cell in found]


def value_of(row: MethodLock) -> str:
    """Return what names the holding of *row* in forms; the alias has the name of the database."""
    token = f"reserved {row.fencing_token}"
    return f"{row._state.db}:{digest(row.owner or token)}:{row.method_name}"


def confirm(client: Client, *rows: MethodLock) -> Page:
    """Return the page that asks whether to release these."""
    return client.get(FORCE, {"lock": [value_of(row) for row in rows]}, follow=True)


def submit(client: Client, page: Page) -> Page:
    """Send the form of a confirmation page as it is."""
    values = re.findall(r'name="lock" value="(.*?)"', page.text)
    assert values
    return client.post(FORCE, {"lock": values}, follow=True)


def messages(page: Page) -> list[str]:
    return [str(message) for message in page.context["messages"]]


def row_of(database: str, name: str) -> MethodLock:
    return MethodLock.objects.using(database).get(method_name=server_key(name))


@contextmanager
def forced() -> Iterator[list[dict[str, Any]]]:
    """Collect what lock_forced tells meanwhile."""
    told: list[dict[str, Any]] = []

    def receive(signal: object, **facts: Any) -> None:
        told.append(facts)

    with listening(lock_forced, receive):
        yield told


@contextmanager
def losing(name: str, using: str, **wishes: Any) -> Iterator[Lease]:
    """Hold a lock that is lost meanwhile."""
    with pytest.raises(LockNotHeld), lock(name, using=using, **wishes) as lease:
        yield lease


# What it shows


SHOWN = {
    LockState.HELD: ["held", str(HOLDER), "118 minutes"],
    LockState.STALE: ["stale", str(HOLDER), "ended"],
    LockState.RESERVED: ["reserved", "-", "until "],
    LockState.FREE: ["free", "-", "-"],
}


def test_list_of_each_state_shows_holder_time_and_waiters(
    database: str, name: str, viewer: Client
) -> None:
    rows = {each: put(database, f"{name}:{each}", each) for each in LockState}
    for row in rows.values():
        for lives in (timedelta(hours=1), timedelta(hours=1), timedelta(hours=-1)):
            put_waiter(database, row, lives)

    for state, shown in SHOWN.items():
        page = listed(viewer, q=name, state=state.value, alias=database)

        assert [held.name for held in rows_of(page).values()] == [f"{name}:{state}"]
        state_cell, holder, since, remaining, waiters, alias = cells(page, f"{name}:{state}")[1:]
        assert [state_cell, holder, remaining[: len(shown[2])]] == shown
        # On other servers waiters have no places.
        assert waiters == ("2" if database == "postgres" and state != LockState.FREE else "-")
        assert alias == database
        assert (since == "-") is (state == LockState.RESERVED)


def test_search_finds_by_name_and_by_key(database: str, name: str, viewer: Client) -> None:
    row = put(database, f"{name} Ä")

    by_name = rows_of(listed(viewer, q=f"{name} Ä", state="free"))
    by_key = rows_of(listed(viewer, q=row.method_name, state="free"))

    assert [*by_name] == [*by_key] == [row.method_name]


def test_free_locks_are_as_many_as_a_page_can_show_and_cannot_be_selected(
    database: str, name: str, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (records, operators):
        monkeypatch.setattr(module, "MOST_FREE", 3)
    rows = [put(database, f"{name}:{number}") for number in range(5)]

    page = listed(operator, q=name, state="free", alias=database)

    assert [*rows_of(page)] == [row.method_name for row in rows[:3]]
    told = "At most 3 of its free locks are shown. Search by name for others."
    assert page.context["problems"] == {database: told}
    page_of_one = listed(operator, q=f"{name}:4", state="free", alias=database)
    assert not page_of_one.context["problems"]
    assert {held.token for held in rows_of(page).values()} <= {row.fencing_token for row in rows}
    assert 'name="selected"' not in page.text
    assert name not in listed(operator, q=name).text.partition("distlock-live")[2]


def test_a_lock_that_a_session_holds_is_not_listed_as_free(name: str, viewer: Client) -> None:
    for kind in ("row", "advisory"):
        for prefix in ("", "shop"):
            put("default", name, method_name=server_key(name, kind=kind, prefix=prefix))
    put("default", name)

    assert [*rows_of(listed(viewer, q=name, state="free"))] == [name]


def test_hostile_text_is_escaped_everywhere_and_leads_to_its_page(
    name: str, operator: Client
) -> None:
    written = {"host": MARKS, "pid": 1, "thread": HOSTILE, "task": MARKS, "purpose": HOSTILE}
    hostile = f"{HOSTILE}{MARKS}{name}"
    row = put("default", hostile, LockState.HELD, holder=json.dumps(written))

    page = listed(operator, q=name)
    [link] = re.findall(rf'id="open {re.escape(value_of(row))}" href="([^"]*)"', page.text)
    pages = [page, operator.get(link), confirm(operator, row)]
    told = submit(operator, pages[2]).text
    pages.append(listed(operator, q=name, state="free"))

    for text in (told, *(page.text for page in pages)):
        assert "<script>alert" not in text
        assert not [mark for mark in MARKS[1:] if mark in text and not mark.isprintable()]
    assert all("&lt;script&gt;alert(" in page.text for page in pages)


def test_owner_is_shown_nowhere(
    name: str, operator: Client, caplog: pytest.LogCaptureFixture
) -> None:
    row = put("default", name, LockState.HELD)
    secrets = [str(row.owner), str(row.last_owner)]

    with caplog.at_level(logging.DEBUG), forced() as told:
        pages = [listed(operator, q=name), operator.get(detail_url(row)), confirm(operator, row)]
        pages.append(submit(operator, pages[-1]))

    texts = [*(page.text for page in pages), caplog.text, repr(told)]
    texts += [f"{entry.object_repr} {entry.change_message}" for entry in LogEntry.objects.all()]
    assert not [text for text in texts for secret in secrets if secret in text]
    assert digest(secrets[0]) in pages[2].text


def test_aliases_over_one_table_are_shown_apart(
    name: str, viewer: Client, settings: Settings
) -> None:
    settings.DISTLOCK = {"default": {}, "billing": {"KEY_PREFIX": "billing"}}
    for alias in settings.DISTLOCK:
        with lock(name, using=alias):
            pass
    put("default", f"{name}:stranger", method_name=f"wiki|{name}:stranger")

    rows = listed(viewer, q=name, state="free").context["page"]

    shown = {row.held.key: row.aliases for row in rows}
    assert shown == {name: ("default",), f"billing|{name}": ("billing",)}


def test_a_tenant_sees_its_own_free_locks(name: str, viewer: Client, settings: Settings) -> None:
    settings.DISTLOCK = {"default": {"KEY_PREFIX": tenancy.PREFIX}, "plain": {}}
    for each in ("north", "south"):
        with tenant(each), lock(name):
            pass
    with lock(name, using="plain"):
        pass

    with tenant("north"):
        rows = rows_of(listed(viewer, q=name, state="free"))

    assert {*rows} == {f"north|{name}", name}


def test_long_name_is_shortened_in_the_list_and_whole_on_its_page(
    name: str, viewer: Client
) -> None:
    row = put("default", name + "x" * 9_900, LockState.HELD)

    in_list = listed(viewer, q=name).text
    on_page = viewer.get(detail_url(row)).text

    assert "x" * 61 not in in_list
    assert "x" * 9_900 in on_page


# Who may do what


def test_nobody_adds_edits_or_deletes(name: str) -> None:
    client, row = superuser(), put("default", name, LockState.HELD)

    client.post(detail_url(row), {"description": "other"})
    refused = [
        client.get(f"{LIST}add/"),
        client.post(f"{LIST}{row.pk}/delete/", {"post": "yes"}),
        client.post(LIST, {"action": "delete_selected", "_selected_action": str(row.pk)}),
    ]

    assert [page.status_code for page in refused] == [404, 404, 200]
    assert reread(row) == row
    assert "delete_selected" not in listed(client).text


def test_forced_release_is_neither_offered_nor_done_without_both_permissions(
    name: str, viewer: Client
) -> None:
    row = put("default", name, LockState.HELD)

    offered = listed(viewer, q=name).content + viewer.get(detail_url(row)).content
    asked = confirm(viewer, row)
    done = viewer.post(FORCE, {"lock": value_of(row)})

    assert b"orce release" not in offered
    assert b'type="checkbox"' not in offered
    assert (asked.status_code, done.status_code) == (403, 403)
    assert cast("MethodLock", reread(row)).owner == row.owner
    assert confirm(client_of("force_release_methodlock"), row).status_code == 403


def test_forced_release_needs_a_csrf_token(name: str) -> None:
    client = client_of("view_methodlock", "force_release_methodlock", csrf=True)
    row = put("default", name, LockState.HELD)
    values = {"lock": value_of(row)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("django.security.csrf"), "disabled", True)
        refused = client.post(FORCE, values)
    token = re.findall(r'name="csrfmiddlewaretoken" value="(.*?)"', confirm(client, row).text)
    client.post(FORCE, {**values, "csrfmiddlewaretoken": token[-1]})

    assert refused.status_code == 403
    assert cast("MethodLock", reread(row)).owner is None


# The forced release


def test_forced_release_frees_the_lock_and_tells_everybody(
    name: str, operator: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with losing(name, "default", ttl=300, purpose="GET /fees/") as lease, forced() as told:
        row = row_of("default", name)
        page = confirm(operator, row)
        done = submit(operator, page)

        assert lease.lost  # one in another process is told at its next renewal
        with lock(name, using="default", timeout=2) as later:
            assert cast("int", later.fencing_token) > cast("int", lease.fencing_token) + 1
    [entry] = LogEntry.objects.filter(object_id=row.method_name, object_repr=name)
    [fact] = told
    [line] = [record for record in caplog.records if "held by" in record.message]

    assert name in page.text
    assert str(Holder.current("GET /fees/")) in page.text
    assert messages(done) == ["1 lock was released."]
    assert entry.user.pk == int(operator.session["_auth_user_id"])
    assert entry.get_change_message() == (
        f"Forced the release on alias “default”: held by {Holder.current('GET /fees/')}, "
        f"fencing token {row.fencing_token}."
    )
    assert (fact["sender"], fact["name"], fact["using"]) == (DatabaseBackend, name, "default")
    assert fact["holder"] == Holder.current("GET /fees/")
    assert line.levelname == "WARNING"
    assert name in line.message
    assert entry.user.username in line.message


def test_what_min_hold_reserves_is_freed_and_logged_as_that(name: str, operator: Client) -> None:
    with lock(name, min_hold=600) as lease:
        held = confirm(operator, row_of("default", name))
    row = row_of("default", name)

    refused = submit(operator, held)
    with pytest.raises(LockNotAcquired), lock(name, timeout=0):
        pass
    assert f"{FORCE}?lock={urlquote(value_of(row))}" in operator.get(detail_url(row)).text
    asked = confirm(operator, row)
    with forced() as told:
        done = submit(operator, asked)

    assert "not released: the holder that was shown does not hold it any more." in refused.text
    assert messages(done) == ["1 lock was released."]
    [entry] = LogEntry.objects.filter(object_id=row.method_name, object_repr=name)
    assert entry.get_change_message() == (
        f"Ended the reservation by min_hold on alias “default”, fencing token {row.fencing_token}."
    )
    assert [fact["holder"] for fact in told] == [None]
    with lock(name, timeout=0, min_hold=600) as later:
        assert cast("int", later.fencing_token) > cast("int", lease.fencing_token) + 1
    assert "not released" in messages(submit(operator, asked))[0]  # it was reserved once more


def test_what_is_reserved_is_shown_and_told_where_times_have_no_zone(
    name: str, operator: Client, settings: Settings
) -> None:
    settings.USE_TZ = False
    with lock(name, min_hold=600):
        pass

    with pytest.raises(LockNotAcquired) as caught, lock(name, timeout=0):
        pass
    found = cells(listed(operator, q=name, state="reserved"), name)

    assert found[1] == "reserved"
    assert re.fullmatch(r"until (\d{4}-\d\d-\d\d )?\d\d:\d\d", found[4])
    assert f"is reserved {found[4]} (" in str(caught.value)
    assert messages(submit(operator, confirm(operator, row_of("default", name)))) == [
        "1 lock was released."
    ]


def test_action_asks_for_those_that_are_held_and_frees_them(
    database: str, name: str, operator: Client
) -> None:
    rows = {state: put(database, f"{name}:{state}", state) for state in LockState}
    selected = [value_of(row) for row in rows.values()]

    page = operator.post(FORCE, {"selected": selected})
    done = submit(operator, page)

    shown = page.text
    assert f"{name}:held" in shown
    assert f"{name}:stale" in shown
    assert f"{name}:reserved" in shown
    assert f"{name}:free" not in shown
    assert messages(done) == ["3 locks were released."]
    taken = [state for state in LockState if state != LockState.FREE]
    freed = [cast("MethodLock", reread(rows[state])) for state in taken]
    assert [row.owner for row in freed] == [None, None, None]
    tokens = [rows[state].fencing_token + 1 for state in taken]
    assert [row.fencing_token for row in freed] == tokens
    counters = FencingCounter.objects.using(database).order_by("value")
    keys = [row.method_name for row in freed]
    assert [one.value for one in counters.filter(method_name__in=keys)] == sorted(tokens)


def test_its_page_writes_the_fencing_token_as_logs_do(
    name: str, viewer: Client, settings: Settings
) -> None:
    settings.USE_THOUSAND_SEPARATOR = True

    with lock(name) as lease:
        page = viewer.get(detail_url(row_of("default", name)))

    assert f"<dd>{lease.fencing_token}</dd>" in page.text


def test_page_of_a_held_lock_has_the_button_and_that_of_a_free_one_has_not(
    name: str, operator: Client
) -> None:
    held, free = put("default", name, LockState.HELD), put("default", f"{name}:free")

    assert f"{FORCE}?lock={urlquote(value_of(held))}" in operator.get(detail_url(held)).text
    assert FORCE not in operator.get(detail_url(free)).text


@pytest.mark.parametrize("value", ["", "nonsense", "9" * 5000, "x:y", ":"])
def test_nonsense_frees_nothing_and_breaks_nothing(operator: Client, value: str) -> None:
    done = operator.post(FORCE, {"lock": value}, follow=True)
    asked = operator.get(FORCE, {"lock": value}, follow=True)

    assert (done.status_code, asked.status_code) == (200, 200)
    assert "not released" in messages(done)[0]
    assert messages(asked) == ["Nobody holds what was selected."]


def test_no_more_locks_are_released_at_once_than_anybody_reads(
    name: str, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "MOST_AT_ONCE", 3)
    rows = [put("default", f"{name}:{n}", LockState.HELD) for n in range(4)]
    selected = [value_of(row) for row in rows]

    asked = operator.post(FORCE, {"selected": selected}, follow=True)

    assert messages(asked) == ["Select at most 3 held locks."]


def test_under_atomic_requests_the_release_is_done_and_told(
    database: str, name: str, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in {"default", database}:
        monkeypatch.setitem(connections[each].settings_dict, "ATOMIC_REQUESTS", True)
    row = put(database, name, LockState.HELD)
    seen: list[bool] = []
    free = DatabaseBackend.end_holding

    def busy_elsewhere(self: DatabaseBackend, key: str, owner_digest: str) -> bool:
        # Another writer between what this request has read and what it writes.
        thread = threading.Thread(target=write_elsewhere, args=[database, f"{name}:other"])
        thread.start()
        thread.join()
        seen.append(connections[database].in_atomic_block)
        return free(self, key, owner_digest)

    monkeypatch.setattr(DatabaseBackend, "end_holding", busy_elsewhere)
    with forced() as told:
        done = submit(operator, confirm(operator, row))

    assert messages(done) == ["1 lock was released."]
    assert seen == [False]
    assert len(told) == 1
    assert cast("MethodLock", reread(row)).owner is None


def write_elsewhere(database: str, name: str) -> None:
    put(database, name)
    connections[database].close()


def test_log_entry_that_cannot_be_written_undoes_the_release(
    name: str, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = put("default", name, LockState.HELD)
    page = confirm(operator, row)

    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("no place left")

    monkeypatch.setattr(LogEntry, "save", refuse)
    with forced() as told, pytest.raises(RuntimeError, match="no place left"):
        submit(operator, page)

    assert told == []
    assert cast("MethodLock", reread(row)).owner == row.owner


def test_guarded_transaction_is_not_waited_for_and_ends_before_the_next_holding(
    database: str, name: str, operator: Client, settings: Settings
) -> None:
    if database == "default":
        pytest.skip("SQLite has one writer at a time: the guarding transaction is waited for")
    # MariaDB takes up to two seconds to end a wait for a row that may take one.
    settings.DISTLOCK = {database: {"OPTIONS": {"using": database, "io_timeout": 4.0}}}
    rival = locks[database].request(name, ttl=5, holder=HOLDER)
    with losing(name, database, ttl=60) as lease:
        with transaction.atomic(using=database):
            lease.guard(using=database)
            in_thread(lambda: submit(operator, confirm(operator, row_of(database, name))))

            assert row_of(database, name).owner is None
            assert isinstance(locks[database].try_acquire(rival, queued=False), Busy)
        later = locks[database].try_acquire(rival, queued=False)
        assert isinstance(later, Grant)
        assert cast("int", later.token) > cast("int", lease.fencing_token)


def test_what_the_old_holder_guards_refuses_it(database: str, name: str, operator: Client) -> None:
    with losing(name, database, ttl=60) as lease:
        submit(operator, confirm(operator, row_of(database, name)))

        # As in another process, which does not know yet.
        with transaction.atomic(using=database), pytest.raises(StaleFencingToken):
            locks[database].guard(lease.request, lease.checked_token(), database)


def test_first_live_waiter_is_woken(postgres: object, name: str) -> None:
    row = put("postgres", name, LockState.HELD)
    put_waiter("postgres", row, timedelta(hours=-1), channel="dead")
    put_waiter("postgres", row)
    first = put_waiter("postgres", row, channel="first")
    put_waiter("postgres", row, channel="second")
    listening = connections.create_connection("postgres")
    with listening.cursor() as cursor:
        for channel in ("dead", "first", "second"):
            cursor.execute(f"LISTEN {channel}")

    assert locks["postgres"].force_release(row.method_name, digest(str(row.owner)))

    [note] = listening.connection.notifies(timeout=2, stop_after=1)
    assert (note.channel, note.payload) == ("first", str(first.ticket))
    assert list(listening.connection.notifies(timeout=0.1)) == []
    listening.close()


def in_thread(call: Callable[[], Any]) -> Any:
    """Return what *call* returns in another thread, which closes its connections."""
    results: list[Any] = []

    def run() -> None:
        results.append(call())
        connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert results, "it waits"
    return results[0]
