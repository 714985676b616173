"""The kit for the tests of users."""

import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory, SimpleTestCase
from django.test.utils import override_settings, setup_test_environment

from django_distlock import LockNotAcquired, distributed_lock, lock, locks, respond, testing
from django_distlock.testing import (
    assert_held,
    assert_not_held,
    held_elsewhere,
    override_locks,
    reset_locks,
)
from tests.fixtures import tenancy
from tests.fixtures.eventually import eventually
from tests.fixtures.processes import Spawn
from tests.fixtures.tenancy import tenant
from tests.integration.aliases import MEMORY

pytest_plugins = ["django_distlock.pytest_plugin"]


@pytest.fixture(autouse=True)
def aliases(settings: Any, request: pytest.FixtureRequest) -> Iterator[None]:
    if request.cls is None:  # else it has those that it was decorated for
        settings.DISTLOCK = {"default": {**MEMORY, "TIMEOUT": 20}, "other": MEMORY}
    yield
    reset_locks()


def test_a_lock_that_is_held_elsewhere_is_busy_for_this_thread_too() -> None:
    with held_elsewhere("a"):
        with pytest.raises(LockNotAcquired, match="held by elsewhere pid 1") as busy:
            lock("a", timeout=0).__enter__()
        assert lock("b", timeout=0).acquire()

    assert busy.value.holder == testing.SOMEBODY_ELSE
    assert lock("a", timeout=0).acquire()


def test_whoever_waits_gets_it_when_the_block_ends() -> None:
    told: list[str] = []

    def wait() -> None:
        with lock("a"):
            told.append("got it")

    with held_elsewhere("a"):
        waiter = threading.Thread(target=wait)
        waiter.start()
        eventually(lambda: locks["default"].queue)

    waiter.join(10)
    assert told == ["got it"]


def test_readers_elsewhere_let_readers_in() -> None:
    with held_elsewhere("a", shared=True), held_elsewhere("a", "other"):
        assert not lock("a", timeout=0).acquire()
        assert lock("a", shared=True, timeout=0).acquire()


def test_what_is_held_is_told() -> None:
    with lock("a"), lock("b"):
        assert_held("a")
        with pytest.raises(AssertionError, match=r"Nobody holds lock 'c'\. Held: a, b\."):
            assert_held("c")
        assert_not_held("c")
        with pytest.raises(AssertionError, match=r"Held: 'a'\."):
            assert_not_held("a")
        with pytest.raises(AssertionError, match=r"Held: 'a', 'b'\."):
            assert_not_held()
        assert_not_held(using="other")

    assert_not_held()


def test_what_has_ended_in_a_database_is_not_held(settings: Any) -> None:
    settings.DISTLOCK = {"default": {}}
    name = f"ended:{uuid.uuid4().hex}"
    lease = lock(name, ttl=0.1, renew=False).acquire()
    assert lease
    eventually(lambda: not lock(name).locked())

    assert_not_held(name)
    with pytest.raises(AssertionError, match="Nobody holds lock 'ended:"):
        assert_held(name)


def test_what_is_held_for_one_tenant_is_not_held_for_another(settings: Any) -> None:
    settings.DISTLOCK = {"default": {**MEMORY, "KEY_PREFIX": tenancy.PREFIX}}
    with tenant("north"), held_elsewhere("a"):
        assert_held("a")
        with tenant("south"):
            assert_not_held()
            assert_not_held("a")
            with held_elsewhere("a", limit=2):
                assert_held("a")


def test_a_reset_leaves_nothing() -> None:
    lease = lock("a").acquire()
    locks["default"].try_acquire(
        locks["default"].request("b", ttl=9, holder=testing.SOMEBODY_ELSE), queued=False
    )

    reset_locks()

    assert lease
    assert not lease.held
    assert_not_held()


@pytest.fixture
def left_behind() -> None:
    assert lock("a").acquire()


def test_the_fixture_begins_with_no_lock(left_behind: None, distlock: Any) -> None:
    distlock.assert_not_held()
    with distlock.held_elsewhere("a"):
        distlock.assert_held("a")


@distributed_lock("work", timeout=20, on_busy=respond())
def work(request: HttpRequest) -> HttpResponse:
    return HttpResponse("done")


@override_settings(DISTLOCK={"default": MEMORY, "reports": {**MEMORY, "TTL": 5}})
class TestOverrides(SimpleTestCase):
    @override_locks(free=True)
    def test_a_method_has_the_aliases_of_its_class(self) -> None:
        with lock("a", using="reports") as lease:
            assert lease.ttl == 5


@override_settings(DISTLOCK={"default": MEMORY, "reports": {**MEMORY, "TTL": 5}})
class SettingsOfTests(SimpleTestCase):
    """The base class of tests, with their settings."""


@override_locks(busy=True)
class TestOverridesOfClass(SettingsOfTests):
    def test_a_class_has_the_aliases_of_its_base(self) -> None:
        assert lock("a", using="reports", timeout=0).acquire() is None


@override_locks(busy=True)
@override_settings(DISTLOCK={"default": MEMORY, "reports": {**MEMORY, "TTL": 5}})
class TestOverridesBeside(SimpleTestCase):
    def test_a_class_has_the_aliases_of_its_other_decorator(self) -> None:
        assert lock("a", using="reports", timeout=0).acquire() is None


def test_names_are_told_however_they_are_written() -> None:
    for name in ("a\nb", "e\u0301"):
        with lock(name, limit=2):
            assert_held(name)
            with pytest.raises(AssertionError):
                assert_not_held(name)


def run_a_test_again() -> list[int]:
    """Run one test three times, as a runner does that tries a failed test again; return how many errors each run had."""

    class Tests(SimpleTestCase):
        def test_report(self) -> None:
            with lock("a", timeout=0, min_hold=600):
                pass

    os.environ.pop("PYTEST_CURRENT_TEST", None)
    setup_test_environment()
    results = [Tests("test_report").run() for _ in range(3)]
    return [len(each.errors) for each in results if each]


def test_a_test_that_runs_again_begins_without_locks(spawn: Spawn) -> None:
    child = spawn(f"{__name__}:run_a_test_again", aliases={"default": MEMORY})

    assert child.expect("returned")["value"] == [0, 0, 0]


SUITE = """
import unittest, django
from django.conf import settings
from django.test.utils import setup_test_environment

settings.configure(
    DISTLOCK={"default": {"BACKEND": "django_distlock.backends.locmem.LocMemBackend"}},
    INSTALLED_APPS=["django_distlock"],
)
django.setup()
setup_test_environment()

from django.test import SimpleTestCase
from django_distlock import lock

kept = []

class Tests(SimpleTestCase):
    def test_1(self):
        kept.append(lock("a", timeout=0, reentrant=False).acquire())
        self.assertTrue(kept[-1])

    test_2 = test_1

unittest.main()
"""


def test_tests_that_a_test_of_pytest_runs_in_another_process_begin_without_locks() -> None:
    assert os.environ["PYTEST_CURRENT_TEST"]
    run = subprocess.run(
        [sys.executable, "-c", SUITE], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr


def test_free_locks_exclude_nobody() -> None:
    with override_locks(free=True):
        with held_elsewhere("work"):
            assert work(RequestFactory().get("/")).content == b"done"
        assert_not_held()


def test_busy_locks_are_refused_at_once() -> None:
    with override_locks(busy=True):
        assert work(RequestFactory().get("/")).status_code == 409
        with pytest.raises(LockNotAcquired, match="elsewhere"):
            lock("x", timeout=None).__enter__()
        assert lock("x", using="other", timeout=None).acquire() is None
        assert lock("x").locked()
        with pytest.raises(LockNotAcquired, match="all of its 4 places, one of them held by"):
            lock("x", limit=4).__enter__()

    assert work(RequestFactory().get("/")).status_code == 200


def is_busy(name: str) -> bool:
    return lock(name, timeout=0, reentrant=False).acquire() is None


@pytest.mark.parametrize(
    "other",
    [
        override_locks(free=True),
        override_locks(busy=True),
        override_settings(DISTLOCK={"default": {**MEMORY, "TTL": 5}}),
        override_settings(CACHES={}),
    ],
)
def test_what_is_held_is_so_after_other_settings_too(other: override_settings) -> None:
    with lock("a") as lease:
        token = lease.fencing_token
        with other:
            assert lease.held

        assert lease.held
        assert is_busy("a")
        with lock("a") as again:
            assert again is lease
    with lock("a") as later:
        assert later.fencing_token > token  # type: ignore[operator]  # the memory gives tokens
    assert_not_held()


def test_other_settings_of_locks_in_memory_let_nobody_in() -> None:
    with lock("a"), override_settings(DISTLOCK={"default": {**MEMORY, "TTL": 5}}):
        assert is_busy("a")


@pytest.mark.parametrize("wrong", [{}, {"free": True, "busy": True}])
def test_locks_are_free_or_busy(wrong: dict[str, bool]) -> None:
    with pytest.raises(TypeError, match="free=True or busy=True"):
        override_locks(**wrong)


@override_locks(busy=True)
class TestDecorated(SimpleTestCase):
    def test_of_a_class(self) -> None:
        assert lock("x").locked()

    @override_locks(free=True)
    def test_of_a_method(self) -> None:
        assert not lock("x").locked()
