"""Who listens on the server for the waiters of one process."""

from __future__ import annotations

from django_distlock.backends.redis.backend import Listeners
from django_distlock.engine.bells import ThreadBell
from django_distlock.engine.holder import Holder
from django_distlock.engine.values import Request


def request() -> Request:
    return Request("name", "key", 20.0, Holder.current())


def test_who_leaves_before_it_has_begun_to_listen_has_the_next_one_listen() -> None:
    listeners, (first, second, third) = Listeners(), (request() for _ in range(3))
    bells = [ThreadBell() for _ in range(3)]
    assert listeners.listens(first, bells[0])
    assert not listeners.listens(second, bells[1])
    assert not listeners.listens(third, bells[2])

    listeners.leave(first)
    assert bells[1].wait(0)
    listeners.leave(second)

    assert bells[2].wait(0)
    assert listeners.listens(third, bells[2])


def test_who_leaves_while_another_one_listens_rings_nobody() -> None:
    listeners, (first, second, third) = Listeners(), (request() for _ in range(3))
    bells = [ThreadBell() for _ in range(3)]
    assert listeners.listens(first, bells[0])
    assert not listeners.listens(second, bells[1])
    assert not listeners.listens(third, bells[2])

    listeners.leave(second)

    assert not any(bell.wait(0) for bell in bells)
