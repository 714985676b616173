"""The example of docs/howto/write-a-backend.md: what the contract over its profile does not ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from django_distlock import InvalidLockBackend, LockBackendError, LockOutcomeUnknown, lock, locks

if TYPE_CHECKING:
    from pytest_django import Settings

    from testproject.etcd import EtcdBackend


@pytest.fixture
def backend(settings: Settings) -> EtcdBackend:
    settings.DISTLOCK = {"etcd": {"BACKEND": "testproject.etcd.EtcdBackend"}}
    made: EtcdBackend = locks["etcd"]  # type: ignore[assignment]  # by these settings
    return made


@pytest.mark.parametrize(
    ("error", "raised"),
    [(ConnectionRefusedError("no"), LockBackendError), (TimeoutError("slow"), LockOutcomeUnknown)],
    ids=lambda each: getattr(each, "__name__", type(each).__name__),
)
def test_an_error_of_the_client_says_whether_the_request_may_have_arrived(
    backend: EtcdBackend,
    monkeypatch: pytest.MonkeyPatch,
    error: OSError,
    raised: type[LockBackendError],
) -> None:
    def fail(key: str) -> None:
        raise error

    monkeypatch.setattr(backend._etcd, "get", fail)

    with pytest.raises(LockBackendError) as caught:
        backend.probe(backend.request("report", ttl=1, holder=None))
    assert type(caught.value) is raised
    assert caught.value.__cause__ is error


def test_a_wrong_endpoint_is_refused(settings: Settings) -> None:
    path = "testproject.etcd.EtcdBackend"
    settings.DISTLOCK = {"etcd": {"BACKEND": path, "OPTIONS": {"endpoint": 2379}}}

    with pytest.raises(InvalidLockBackend, match="'endpoint' must be a str, not 2379"):
        locks["etcd"]


def test_an_extension_of_another_ttl_keeps_the_token(backend: EtcdBackend) -> None:
    with lock("report", using="etcd", ttl=5) as lease:
        token = lease.fencing_token
        lease.extend(50)

        assert lease.remaining > 40
        [held] = [each for each in backend.held() if each.name == "report"]
        assert held.token == token
        assert held.remaining is not None
        assert held.remaining > 40
