"""What servers are asked, all of them or some, and when enough has been said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django_distlock.backends.redis.scripts import Call, Script
from django_distlock.backends.redis.verbs import microseconds
from django_distlock.engine import clock
from django_distlock.engine.naming import LONGEST_LISTED, printable

from .scripts import ACQUIRE, EXTEND, FORCE, LOOK, RAISE, RELEASE, TAKE_OVER
from .validity import connect_timeout, server_timeout
from .votes import Election, Question

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from django_distlock.backends.redis.scripts import KeySpace
    from django_distlock.engine.values import Request

    from .options import RedlockOptions
    from .tally import Tally
    from .votes import Count

#: A ttl for which servers have as long for their answers as they ever have.
UNHURRIED = 10.0


class Questions:
    """The questions of one alias; *spaces* has the keys of each server.

    *guard*: seconds that a server must have been up before it may grant; 0 for none.
    """

    def __init__(
        self, spaces: Sequence[KeySpace], options: RedlockOptions, guard: float, tally: Tally
    ) -> None:
        self._spaces = spaces
        self._options = options
        self._guard = guard
        self._tally = tally
        self._everybody = range(tally.total)

    def for_votes(self, request: Request) -> Question:
        """Ask all for the lock."""
        calls = self._of_all(
            ACQUIRE,
            request.key,
            request.owner,
            _sent(),
            microseconds(request.ttl),
            printable(request.name, LONGEST_LISTED),
            request.holder.to_json(),
            f"{self._guard:.3f}",
            "1" if self._options.durable else "",
        )
        return self._question(request.ttl, calls, self._tally.is_elected)

    def to_note(self, request: Request, token: int, voters: Collection[int]) -> Question:
        """Ask *voters* to take note of the token."""
        calls = {
            server: self._call(RAISE, request.key, server, request.owner, token)
            for server in voters
        }
        return self._question(
            request.ttl, calls, lambda count: self._tally.written(count) is not Election.OPEN
        )

    def to_release(self, request: Request) -> Question:
        """Ask all to give it back, until a majority says whether we had it."""
        calls = self._releases(request, self._everybody)
        return self._question(
            request.ttl, calls, lambda count: self._tally.says_released(count) is not None
        )

    def to_give_back(
        self, request: Request, granted: set[int], others: Collection[int]
    ) -> Question:
        """Ask *granted* to give back what they have, and *others* what they may have yet.

        The others are told when the question reaches them at last: they are not waited for.
        """
        calls = self._releases(request, granted.union(others))
        return self._question(request.ttl, calls, lambda count: not granted & count.pending)

    def to_extend(self, requests: Sequence[Request]) -> Question:
        """Ask all to extend them all."""
        args = tuple(
            arg for request in requests for arg in (request.owner, microseconds(request.ttl))
        )
        calls = {
            server: Call(EXTEND, tuple(space.of(request.key).record for request in requests), args)
            for server, space in enumerate(self._spaces)
        }
        places, says_kept = range(len(requests)), self._tally.says_kept
        return self._question(
            min(request.ttl for request in requests),
            calls,
            lambda count: all(says_kept(count, place) is not None for place in places),
        )

    def to_take_over(self, request: Request, former: str) -> Question:
        """Ask all to have the holding of the owner *former* belong to this one."""
        ttl, holder = microseconds(request.ttl), request.holder.to_json()
        calls = self._of_all(TAKE_OVER, request.key, request.owner, former, ttl, holder, _sent())
        return self._question(request.ttl, calls, self._tally.has_agreed)

    def who_has(self, request: Request) -> Question:
        """Ask all who has it, until that is clear."""
        return self._question(request.ttl, self._of_all(LOOK, request.key), self._tally.is_seen)

    def what_each_has(self, key: str) -> Question:
        """Ask who has it, and wait for each of them."""
        return self._question(UNHURRIED, self._of_all(LOOK, key), _never)

    def to_force(self, key: str, owner: bytes) -> Question:
        """Ask all to end the holding of *owner*, and wait for each of them."""
        return self._question(UNHURRIED, self._of_all(FORCE, key, owner), _never)

    def look(self, key: str, server: int) -> Call:
        """Return what one server is asked when all that is held is listed."""
        return self._call(LOOK, key, server)

    def _question(
        self, ttl: float, calls: dict[int, Call], is_decided: Callable[[Count], bool]
    ) -> Question:
        options = self._options
        within = server_timeout(ttl, options.server_timeout)
        return Question(calls, is_decided, within, connect_timeout(ttl, options.connect_timeout))

    def _releases(self, request: Request, servers: Collection[int]) -> dict[int, Call]:
        sent = _sent()
        return {
            server: self._call(RELEASE, request.key, server, request.owner, sent)
            for server in servers
        }

    def _of_all(self, script: Script, key: str, *args: Any) -> dict[int, Call]:
        return {server: self._call(script, key, server, *args) for server in self._everybody}

    def _call(self, script: Script, key: str, server: int, *args: Any) -> Call:
        return Call(script, (self._spaces[server].of(key).record,), args)


def _sent() -> int:
    """Return what tells later questions of one owner from earlier ones: all are asked by one machine."""
    return int(clock.wait_time() * 1_000_000)


def _never(_: Count) -> bool:
    """Wait for each of them."""
    return False
