"""What a profile declares is what its backend says of itself."""

from __future__ import annotations

import pytest

from django_distlock import NotSupported, lock
from django_distlock.backends.base import BaseLockBackend
from django_distlock.engine.waiting import Way

from .profiles import FLAGS, Profile, lacks


def test_declared_traits_are_the_flags_of_the_backend(
    profile: Profile, backend: BaseLockBackend
) -> None:
    flags = {trait for trait, flag in FLAGS.items() if getattr(backend, flag)}

    assert flags == profile.traits & set(FLAGS)
    assert (backend.waiting.way is Way.LISTEN) is ("wakes_waiters" in profile.traits)
    assert ("leased" in profile.traits) is not backend.session_bound
    assert backend.supports_fair or "fair" not in profile.traits


@lacks("shared")
def test_a_backend_without_readers_refuses_to_share(using: str, name: str) -> None:
    with pytest.raises(NotSupported, match="shared"):
        lock(name, using=using, shared=True).acquire()


@lacks("listing")
def test_a_backend_that_cannot_list_says_so(backend: BaseLockBackend) -> None:
    with pytest.raises(NotSupported, match="listing"):
        list(backend.held())
    with pytest.raises(NotSupported, match="force_release"):
        backend.force_release("key", "digest")


@lacks("detach")
def test_a_lease_bound_to_its_process_cannot_be_detached(using: str, name: str) -> None:
    with lock(name, using=using) as lease, pytest.raises(NotSupported, match="detach"):
        lease.detach()


@lacks("fencing")
def test_a_backend_without_fencing_gives_no_token(using: str, name: str) -> None:
    with lock(name, using=using) as lease:
        assert lease.fencing_token is None
        with pytest.raises(NotSupported, match="fencing"):
            lease.checked_token()


@lacks("min_hold")
def test_a_backend_that_cannot_keep_a_name_back_says_so(using: str, name: str) -> None:
    with pytest.raises(NotSupported, match="min_hold"):
        lock(name, using=using, min_hold=1).acquire()
