"""KEY_PREFIX is a function: each tenant has locks of its own, on every backend."""

from __future__ import annotations

import asyncio

import pytest

from django_distlock import Lease, current_lease, force_release, lock
from django_distlock.operators import holdings, look_up, survey
from tests.fixtures.tenancy import prefix, tenant

from .crew import can_take, elsewhere, taken
from .profiles import Profile, needs

#: The alias of the same settings whose prefix is that of the tenant.
USING = "tenants"

pytestmark = [needs("typical"), pytest.mark.usefixtures("using")]


def _is_free(name: str) -> bool:
    """Return whether another thread, of the same tenant, can take the lock."""
    own = prefix()

    def tries() -> bool:
        with tenant(own):
            return can_take(USING, name)

    return elsewhere(tries)


def test_a_thread_that_goes_from_one_tenant_to_another_holds_both_locks(name: str) -> None:
    with tenant("a"), lock(name, using=USING, timeout=0) as of_a:
        with tenant("b"):
            assert not lock(name, using=USING).locked()
            assert current_lease(name) is None
            with lock(name, using=USING, timeout=0) as of_b:
                assert of_b is not of_a
                assert current_lease(name) is of_b
                with tenant("a"), lock(name, using=USING, timeout=0) as again:
                    assert again is of_a
                    assert current_lease(name) is of_a
                assert not _is_free(name)
            assert _is_free(name)
        assert of_a.held
        assert not _is_free(name)
    with tenant("a"):
        assert _is_free(name)


async def test_a_task_that_goes_from_one_tenant_to_another_holds_both_locks(name: str) -> None:
    with tenant("a"):
        of_a = await asyncio.ensure_future(lock(name, using=USING, timeout=0).aacquire())
    with tenant("b"):
        assert not await lock(name, using=USING).alocked()
        async with lock(name, using=USING, timeout=0) as of_b:
            assert of_b is not of_a
            with tenant("a"):
                async with lock(name, using=USING, timeout=0) as again:
                    assert again is of_a
    await of_a.arelease()


def test_a_lease_stays_what_it_is_wherever_it_is_extended_and_released(
    name: str, profile: Profile, tick: float
) -> None:
    with tenant("a"):
        lease = taken(name, using=USING)

    with tenant("b"):
        lease.extend()
        lease.check()
        assert _is_free(name)
    with tenant("a"):
        assert not _is_free(name)
    with tenant("b"):
        lease.release()

    with tenant("a"):
        assert _is_free(name)


@needs("detach")
def test_a_lease_is_attached_under_the_key_that_it_has(name: str) -> None:
    with tenant("a"):
        lease, place = taken(name, using=USING), taken(name, using=USING, limit=2)
    texts = lease.detach(), place.detach()

    with tenant("b"):
        attached, in_place = map(Lease.attach, texts)
        assert current_lease(name) is None
        assert _is_free(name)
    with tenant("a"):
        assert not _is_free(name)
        assert current_lease(name) is in_place
        with lock(name, using=USING, timeout=0) as again:
            assert again is attached
        with lock(name, using=USING, limit=2, timeout=0) as again:
            assert again is in_place
        in_place.release()
        attached.release()
        assert _is_free(name)


@needs("listing")
def test_a_tenant_lists_and_frees_its_own_locks(name: str) -> None:
    with tenant("a"):
        lease = taken(name, using=USING)
    key = lease.request.key

    with tenant("b"):
        assert name not in {held.name for held in holdings(USING)}
        assert holdings(USING, name) == []
        assert name not in {row.held.name for row in survey([USING])[0]}
        assert look_up({USING: [key]}) == ([], {})
        assert force_release(name, using=USING) == 0
    assert lease.held
    with tenant("a"):
        assert name in {held.name for held in holdings(USING)}
        assert name in {row.held.name for row in survey([USING])[0]}
        assert [row.held.key for row in look_up({USING: [key]})[0]] == [key]
        assert force_release(name, using=USING) == 1
    assert lease.lost
