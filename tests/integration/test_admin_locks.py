"""The admin's page of the locks of every alias: what it shows, and what it does when a server fails."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from django.contrib.admin import AdminSite
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import Client, RequestFactory
from django.urls import reverse
from django.utils.translation import gettext, override

from django_distlock import admin, lock, locks, operators
from django_distlock.backends.locmem import LocMemBackend
from django_distlock.engine.values import Held, LockState
from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown
from django_distlock.ground.holder import Holder
from django_distlock.models import HeldLock
from tests.fixtures import tenancy
from tests.fixtures.eventually import eventually, in_time
from tests.fixtures.tenancy import tenant

from .aliases import DOWN, DUMMY, MEMORY
from .lock_rows import put
from .staff import FORCE, LIST, addresses, client_of, detail_url

REDIS = "django_distlock.backends.redis.RedisBackend"
Crowd = Callable[..., None]


@pytest.fixture(autouse=True)
def aliases(settings: Any) -> Iterator[None]:
    settings.DISTLOCK = {"default": {}, "memory": MEMORY}
    settings.ROOT_URLCONF = addresses()
    yield
    locks.close()


@pytest.fixture
def crowd(name: str) -> Iterator[Crowd]:
    """Acquires locks in memory by the verbs, as other holders would."""
    held = []

    def acquire(*endings: str, host: str = "web-1", **wishes: Any) -> None:
        backend = locks["memory"]
        for ending in endings:
            holder = Holder(host, 4711, "MainThread")
            request = backend.request(f"{name}:{ending}", ttl=600, holder=holder, **wishes)
            backend.try_acquire(request, queued=False)
            held.append(request)

    yield acquire
    for request in held:
        locks["memory"].release(request)


def names(client: Client, **query: str) -> list[str]:
    """Return the endings of the names on the page, in its order."""
    rows = client.get(LIST, query).context["page"]
    return [row.held.name.rpartition(":")[2] for row in rows]


def test_it_opens_on_what_is_held_and_stale(name: str, viewer: Client) -> None:
    for state in LockState:
        put("default", f"{name}:{state}", state)

    assert names(viewer, q=name) == ["held", "stale"]
    assert names(viewer, q=name, state="all") == ["free", "held", "reserved", "stale"]
    assert names(viewer, q=name, state="nonsense") == ["held", "stale"]


def test_alias_host_and_name_narrow_it(name: str, viewer: Client, crowd: Crowd) -> None:
    put("default", f"{name}:row", LockState.HELD)
    crowd("one", "ONE again")
    crowd("two", host="web-2")

    assert names(viewer, q=name, alias="default") == ["row"]
    assert names(viewer, q=name, alias="memory", host="web-2") == ["two"]
    assert names(viewer, q=f"{name}:One") == ["one", "ONE again"]
    assert names(viewer, q=name, alias="gone") == ["one", "ONE again", "row", "two"]
    assert "web-2</option>" in viewer.get(LIST).text
    # A host that has no lock any more is still the one that is chosen.
    assert "web-3</option>" in viewer.get(LIST, {"host": "web-3"}).text


def test_each_reader_is_shown_and_one_alone_is_freed(
    name: str, operator: Client, crowd: Crowd
) -> None:
    crowd("read", "read", shared=True)
    page = operator.get(LIST, {"q": name})
    one, other = page.context["page"]

    done: Any = operator.post(FORCE, {"lock": one.value}, follow=True)

    assert page.text.count("held, shared") == 2
    assert "1 lock was released." in done.text
    [left] = operator.get(LIST, {"q": name}).context["page"]
    assert left.value == other.value


def test_places_are_shown_as_such_and_stand_together(name: str, viewer: Client) -> None:
    with ExitStack() as stack:
        for ending, limit in (("b", 3), ("a", 1), ("b", 3), ("c", 1), ("b", 3)):
            wanted = lock(f"{name}:{ending}", using="memory", limit=limit, reentrant=False)
            stack.enter_context(wanted)

        page = viewer.get(LIST, {"q": name})

    shown = [(row.held.name[-1], row.state) for row in page.context["page"]]
    assert shown == [
        ("a", "held, place 0 of 1"),
        *(("b", f"held, place {place} of 3") for place in (0, 1, 2)),
        ("c", "held, place 0 of 1"),
    ]
    assert all(state in page.text for _, state in shown)


@pytest.mark.parametrize("column", admin.COLUMNS)
def test_each_column_sorts_in_both_directions(
    name: str, viewer: Client, crowd: Crowd, column: str
) -> None:
    crowd("a", host="web-3")
    crowd("b", host="web-1", shared=True)
    put("default", f"{name}:c", LockState.STALE)

    up, down = names(viewer, q=name, o=column), names(viewer, q=name, o=f"-{column}")
    page = viewer.get(LIST, {"q": name, "o": column}).content.decode()

    assert sorted(up) == sorted(down) == ["a", "b", "c"]
    if column in {"name", "alias", "state", "remaining"}:
        # Two that are equal in it keep their order.
        assert up[-1] == down[0] or up[0] == down[-1]
        assert up != down
    assert page.count('aria-sort="ascending"') == 1
    assert re.search(rf'aria-sort="ascending"><a [^>]*href="[^"]*o=-{column}', page)


def test_there_are_pages_and_links_to_them(
    name: str, viewer: Client, crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "PAGE", 2)
    crowd("1", "2", "3", "4", "5")

    assert names(viewer, q=name) == ["1", "2"]
    assert names(viewer, q=name, p="3", o="-name") == ["1"]
    assert names(viewer, q=name, p="99") == ["5"]
    assert names(viewer, q=name, p="nonsense") == ["1", "2"]
    assert f"?q={name.replace(':', '%3A')}&amp;p=2" in viewer.get(LIST, {"q": name}).text


def test_aliases_that_meet_the_same_lock_share_a_line(
    name: str, viewer: Client, settings: Any
) -> None:
    settings.DISTLOCK = {"default": {}, "twin": {}, "other": {"KEY_PREFIX": "other"}}
    with ExitStack() as held:
        for alias in ("default", "other"):
            held.enter_context(lock(name, using=alias))
        rows = viewer.get(LIST, {"q": name}).context["page"]

    assert sorted(row.aliases for row in rows) == [("default", "twin"), ("other",)]


def test_a_tenant_is_shown_its_own_locks_even_if_the_list_of_another_is_late(
    name: str, viewer: Client, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.DISTLOCK = {"default": {"KEY_PREFIX": tenancy.PREFIX}}
    with ExitStack() as held:
        for each in ("north", "south"):
            held.enter_context(tenant(each))
            held.enter_context(lock(f"{name}:{each}"))
        with monkeypatch.context() as late:
            late.setattr("django_distlock.operators.PATIENCE", -1.0)
            with tenant("north"):
                viewer.get(LIST, {"q": name})
        for each in ("south", "north"):
            with tenant(each):
                assert names(viewer, q=name) == [each]


def test_an_alias_that_fails_is_a_line_and_the_others_are_shown(
    name: str, viewer: Client, settings: Any
) -> None:
    settings.DISTLOCK = {
        "default": {},
        "down": DOWN,
        "mistaken": {**MEMORY, "OPTIONS": {"colour": "blue"}},
        "dummy": {**DUMMY, "KEY_PREFIX": tenancy.NO_TENANT},
        "no tenant": {**MEMORY, "KEY_PREFIX": tenancy.NO_TENANT},
    }
    put("default", f"{name}:row", LockState.HELD)

    page = viewer.get(LIST, {"q": name})

    problems = page.context["problems"]
    assert list(problems) == ["down", "mistaken", "dummy", "no tenant"]
    assert "cannot be reached" in problems["down"]
    assert "colour" in problems["mistaken"]
    assert "does not support listing" in problems["dummy"]
    assert problems["no tenant"].startswith("KEY_PREFIX, or the KEY_FUNCTION of its cache, failed")
    assert all(f"<strong>{alias}</strong>" in page.text for alias in problems)
    assert [row.held.name for row in page.context["page"]] == [f"{name}:row"]


def test_a_server_that_never_answers_does_not_hold_the_page(
    name: str, viewer: Client, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "PATIENCE", 0.8)
    with socket.create_server(("127.0.0.1", 0)) as server:
        location = f"redis://127.0.0.1:{server.getsockname()[1]}"
        options = {"location": location, "io_timeout": 30.0}
        settings.DISTLOCK = {"default": {}, "hung": {"BACKEND": REDIS, "OPTIONS": options}}
        put("default", f"{name}:row", LockState.HELD)
        pages = list[Any]()
        for _ in range(3):
            in_time(lambda: pages.append(viewer.get(LIST, {"q": name})), 0.0, 4 / 3)
        waiting = [each for each in threading.enumerate() if each.name == "distlock-admin"]

    for page in pages:
        assert page.context["problems"] == {"hung": "It did not answer within 0.8 s."}
        assert [row.held.name for row in page.context["page"]] == [f"{name}:row"]
    # A page that is refreshed every few seconds must not start a thread each time.
    assert len(waiting) == 1
    waiting[0].join(10)
    assert viewer.get(LIST).context["problems"].keys() == {"hung"}


class Slow(LocMemBackend):
    """Tells of one lock at once, and of the others when the test allows it."""

    may_go_on = threading.Event()
    listings = free_listings = 0

    def held(self, key: str | None = None) -> Iterator[Held]:
        first, *others = sorted(super().held(key), key=lambda held: held.name)
        yield first
        if key is None:
            type(self).listings += 1
            assert self.may_go_on.wait(30)
        yield from others

    def free_locks(self, text: str) -> Iterator[Held]:
        type(self).free_listings += 1
        assert self.may_go_on.wait(30)
        yield Held(text, text, None, None, None, "")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, settings: Any) -> Iterator[type[Slow]]:
    monkeypatch.setattr(operators, "PATIENCE", 0.3)
    settings.DISTLOCK = {"default": {}, "memory": {"BACKEND": f"{__name__}.Slow"}}
    locks.reset()  # other tests may have left locks there, with names that come first
    yield Slow
    Slow.may_go_on.set()
    # No thread outlives the test that it belongs to.
    eventually(lambda: "distlock-admin" not in {each.name for each in threading.enumerate()})
    operators.forget_late(["memory"])
    Slow.may_go_on.clear()
    Slow.listings = Slow.free_listings = 0


def test_what_is_read_in_time_is_shown_at_once_and_the_rest_when_it_is_read(
    name: str, viewer: Client, crowd: Crowd, slow: type[Slow]
) -> None:
    crowd("1", "2", "3")
    eventually(lambda: names(viewer, q=name) == ["1"])
    pages = [viewer.get(LIST, {"q": name}) for _ in range(3)]

    for page in pages:
        assert [row.held.name for row in page.context["page"]] == [f"{name}:1"]
        assert page.context["problems"] == {
            "memory": "Its list takes long to read. Locks read so far: 1."
        }
    assert slow.listings == 1

    slow.may_go_on.set()
    eventually(lambda: names(viewer, q=name) == ["1", "2", "3"])


def test_a_late_listing_is_shown_with_its_age_while_the_next_one_is_read(
    name: str, viewer: Client, crowd: Crowd, slow: type[Slow]
) -> None:
    crowd("1", "2", "3")
    viewer.get(LIST)
    slow.may_go_on.set()
    eventually(lambda: names(viewer, q=name) == ["1", "2", "3"])
    slow.may_go_on.clear()

    def page_of_a_second_listing() -> Any:
        page = viewer.get(LIST, {"q": name})
        return slow.listings > 1 and page

    page = eventually(page_of_a_second_listing)

    assert len(page.context["page"]) == 3
    told = page.context["problems"]["memory"]
    assert re.fullmatch(r"Its list takes long to read\. This one is .+ old\.", told)
    assert told in page.text
    # Once it is listed in time again, nothing is kept.
    slow.may_go_on.set()
    eventually(lambda: not viewer.get(LIST, {"q": name}).context["problems"])


def test_free_locks_are_not_read_again_while_an_earlier_page_reads_them(
    name: str, slow: type[Slow]
) -> None:
    for _ in range(3):
        found = operators.free_locks(["memory"], name)
        assert found == ([], {"memory": "It did not answer within 0.3 s."})

    assert slow.free_listings == 1
    assert operators.free_locks(["memory"], f"{name} 2")[0] == []
    assert slow.free_listings == 2
    slow.may_go_on.set()

    def found_now() -> bool:
        rows, problems = operators.free_locks(["memory"], name)
        return [row.held.name for row in rows] == [name] and not problems

    eventually(found_now)


def test_what_is_freed_is_not_shown_by_a_late_listing(
    name: str, operator: Client, crowd: Crowd, slow: type[Slow]
) -> None:
    crowd("1", "2")
    operator.get(LIST)
    slow.may_go_on.set()
    eventually(lambda: names(operator, q=name) == ["1", "2"])
    [row, _] = operator.get(LIST, {"q": name}).context["page"]

    operator.post(FORCE, {"lock": row.value})

    assert names(operator, q=name) == ["2"]


def test_the_page_of_a_lock_and_its_release_need_no_listing(
    name: str, operator: Client, crowd: Crowd, slow: type[Slow]
) -> None:
    crowd("1", "2")
    eventually(lambda: names(operator, q=name) == ["1"])
    [row] = operator.get(LIST, {"q": name}).context["page"]

    detail = operator.get(reverse("admin:django_distlock_heldlock_change", args=[row.held.key]))
    asked = operator.get(FORCE, {"lock": row.value})
    done: Any = operator.post(FORCE, {"lock": row.value}, follow=True)

    assert [each.held.key for each in detail.context["rows"]] == [row.held.key]
    assert [each.held.key for each in asked.context["rows"]] == [row.held.key]
    assert "1 lock was released." in done.text


def test_where_nothing_is_selected_it_says_so_as_django_does(operator: Client) -> None:
    page: Any = operator.post(FORCE, follow=True)

    [told] = [str(message) for message in page.context["messages"]]
    assert told.startswith("Items must be selected in order to perform actions on them.")
    with override("de"):
        assert gettext(told) != told


def test_the_script_gets_the_list_alone(name: str, viewer: Client) -> None:
    put("default", f"{name}:row", LockState.HELD)

    part = viewer.get(LIST, {"q": name}, headers={admin.FRAGMENT: "yes"})

    assert part.headers[admin.FRAGMENT] == "yes"
    assert f"{name}:row" in part.text
    assert "<html" not in part.text
    assert admin.FRAGMENT not in viewer.get(LIST).headers


def test_the_page_needs_no_inline_script_or_style(name: str, operator: Client) -> None:
    row = put("default", f"{name}:row", LockState.HELD)

    for page in (operator.get(LIST), operator.get(detail_url(row))):
        content = page.text[page.text.index('id="content"') : page.text.index("END Content")]
        assert not re.search(r"<script|<style|\sstyle=|\son\w+=", content)


def test_token_and_key_are_on_the_page_of_the_lock_alone_and_both_tell_since_when_it_is_held(
    name: str, operator: Client
) -> None:
    row = put("default", f"{name} Ü", LockState.HELD)

    page = operator.get(LIST, {"q": name}).text
    detail = operator.get(detail_url(row)).text

    assert str(row.fencing_token) not in page
    assert str(row.fencing_token) in detail
    assert row.method_name in detail
    moment = r"[A-Z][a-z]+\.? \d+, \d{4} \d\d:\d\d:\d\d"
    assert re.search(rf'<time [^>]*title="{moment}">[^<]+ ago</time>', page)
    assert re.search(rf"<dd>{moment} \([^<]+ ago\)</dd>", detail)


def test_a_lock_that_is_gone_is_told_with_who_forced_its_release(
    name: str, operator: Client
) -> None:
    row = put("default", name, LockState.HELD)
    url = detail_url(row)
    [shown] = operator.get(LIST, {"q": name}).context["page"]
    operator.post(FORCE, {"lock": shown.value})

    page = operator.get(url).text

    assert "Nobody holds this lock now" in page
    assert "Forced the release on alias “default”" in page
    assert LogEntry.objects.get(object_id=name).get_admin_url() == url.replace(":", "_3A")
    assert operator.get(url.replace(":", "_3A")).text.count(name) == page.count(name)


def test_who_may_not_see_locks_sees_none(name: str, viewer: Client) -> None:
    stranger = client_of("view_user")
    row = put("default", name, LockState.HELD)
    pages = [LIST, FORCE, detail_url(row)]

    assert [stranger.get(page).status_code for page in pages] == [403, 403, 403]
    assert [Client().get(page).status_code for page in pages] == [302, 302, 302]
    assert LIST not in stranger.get(reverse("admin:index")).text
    assert LIST in viewer.get(reverse("admin:index")).text


@pytest.mark.parametrize(("error", "entries"), [(LockBackendError, 0), (LockOutcomeUnknown, 1)])
def test_a_release_that_fails_says_why_and_keeps_its_entry_only_if_it_may_have_happened(
    name: str,
    operator: Client,
    monkeypatch: pytest.MonkeyPatch,
    error: type[LockBackendError],
    entries: int,
) -> None:
    def fail(*args: object) -> bool:
        raise error("memory", "a test says so")

    with lock(name, using="memory") as lease:
        [row] = operator.get(LIST, {"q": name}).context["page"]
        monkeypatch.setattr(LocMemBackend, "end_holding", fail)
        page: Any = operator.post(FORCE, {"lock": row.value}, follow=True)

        assert not lease.lost
    assert f"“{name}” was not released: " in page.text
    assert "a test says so" in page.text
    assert LogEntry.objects.filter(object_id=name).count() == entries


def test_a_lock_whose_server_is_down_is_not_called_free(operator: Client, settings: Any) -> None:
    settings.DISTLOCK = {"default": {}, "down": DOWN}

    page: Any = operator.post(FORCE, {"lock": "down:digest:invoice"}, follow=True)

    [told] = [str(message) for message in page.context["messages"]]
    assert told.startswith("down: Redis at 127.0.0.1:1 cannot be reached")


def test_the_page_has_its_breadcrumbs(name: str, viewer: Client) -> None:
    with lock(name):
        for query in (name, "a name that no lock has"):
            page = viewer.get(LIST, {"q": query}).text
            [found] = re.findall(r'class="breadcrumbs">(.*?)</(?:div|ol)>', page, re.DOTALL)
            told = [part.strip() for part in re.sub(r"<[^>]*>|&rsaquo;", "", found).splitlines()]
            assert [*filter(None, told)] == ["Home", "Distributed locks", "Locks"]


def test_a_subclass_adds_to_the_context_of_the_pages(name: str) -> None:
    more = {"title": "ours"}
    request = RequestFactory().get("/")
    request.user = User.objects.create_superuser(name)
    held = admin.HeldLockAdmin(HeldLock, AdminSite())

    pages: list[Any] = [
        held.changelist_view(request, extra_context=more),
        held.change_view(request, name, form_url="", extra_context=more),
    ]

    assert [page.context_data["title"] for page in pages] == ["ours"] * 2
