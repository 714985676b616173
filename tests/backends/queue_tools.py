"""What the tests of ZooKeeper and etcd share: others who want a lock, and leases that tell of their end."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from django_distlock import Lease, lock, locks
from django_distlock.engine.values import Grant, Request
from django_distlock.ground.holder import Holder
from tests.fixtures.eventually import eventually
from tests.fixtures.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_django.fixtures import Settings


class Counter:
    """A bell that counts."""

    may_stall = False

    def __init__(self) -> None:
        self.rung = 0

    def ring(self) -> bool:
        self.rung += 1
        return True


def rival(name: str, alias: str = "locks", **wishes: Any) -> Request:
    """Return a request as another process would make it."""
    known = {"ttl": 60.0, "holder": Holder.current("rival")}
    return locks[alias].request(name, **{**known, **wishes})


def stands(request: Request, alias: str = "locks") -> int | None:
    """Have *request* stand in line; return its token if it is served at once."""
    answer = locks[alias].try_acquire(request, queued=True, left=None)
    return answer.token if isinstance(answer, Grant) else None


def held(name: str = "x", **terms: Any) -> tuple[Lease, list[str]]:
    """Return a lease on *name*, and a list that will tell how it was lost."""
    lease = lock(name, **{"using": "locks", **terms}).acquire()
    assert lease
    told: list[str] = []
    lease.on_lost(told.append)
    return lease, told


def take(name: str = "x", using: str = "locks", timeout: float = 20) -> None:
    """Wait for the lock, hold it for a moment, and give it back."""
    with lock(name, using=using, timeout=timeout) as lease:
        lease.check()


@contextmanager
def waited_for(
    stands_there: Callable[[], object], timeout: float = 20
) -> Iterator[tuple[Future[None], Callable[[], object]]]:
    """Have "locks" wait for the lock "x", which "elsewhere" holds; give the wait, and what releases the lock."""
    holder = rival("x", "elsewhere")
    assert stands(holder, "elsewhere")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(take, timeout=timeout)
        eventually(stands_there)
        yield waiting, partial(locks["elsewhere"].release, holder)


def set_options(settings: Settings, **options: Any) -> None:
    """Change these OPTIONS of "locks"."""
    near = settings.DISTLOCK["locks"]
    changed = {**near, "OPTIONS": {**near["OPTIONS"], **options}}
    settings.DISTLOCK = {**settings.DISTLOCK, "locks": changed}


@contextmanager
def proxied(settings: Settings, port: int, option: str) -> Iterator[Proxy]:
    """Give what stands between "locks" and the server at *port*; *option* has the addresses of servers."""
    with Proxy(port) as found:
        set_options(settings, **{option: f"127.0.0.1:{found.port}"})
        yield found
        locks.close()
