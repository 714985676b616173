"""The dummy backend: everybody is granted everything, and leases work as with any backend."""

import pytest
from pytest_django import Settings

from django_distlock import LockNotHeld, lock
from tests.contract.crew import elsewhere


@pytest.fixture(autouse=True)
def dummy(settings: Settings) -> None:
    backend = "django_distlock.backends.dummy.DummyBackend"
    settings.DISTLOCK = {"default": {"BACKEND": backend, "TEST": {"BACKEND": None}}}


def test_another_thread_is_granted_what_is_held() -> None:
    def enter() -> bool:
        with lock("a", timeout=0) as lease:
            return lease.held

    with lock("a"):
        assert elsewhere(enter)


def test_it_counts_nothing_as_locked_and_refuses_a_second_release() -> None:
    lease = lock("a").acquire()

    assert lease
    assert not lock("a").locked()
    lease.release()
    with pytest.raises(LockNotHeld):
        lease.release()
