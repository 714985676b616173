"""The verbs of a lock in Redis, as conversations: what is asked, and what the answer means. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redis.exceptions import (
    AuthenticationError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)

from django_distlock.engine.naming import LONGEST_LISTED, printable
from django_distlock.exceptions import LockBackendError

from . import replies
from .replies import microseconds
from .scripts import ACQUIRE, EXTEND, FORCE, KEEP, LEAVE, LOOK, RELEASE, TAKE_OVER, Call

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from django_distlock.engine.values import Busy, Grant, Held, Release, Request

    from .conversation import Command, Conversation
    from .keys import KeySpace
    from .options import RedisSettings

#: Locks renewed by one script: others wait while it runs.
BATCH = 250
#: What people can do about what Redis says: by the driver's error, or by the word that begins it inside a script.
_HINTS = (
    (MovedError, "MOVED", "it belongs to a cluster: say so with OPTIONS 'cluster': True"),
    (
        NoPermissionError,
        "NOPERM",
        "if its user may not run scripts, set OPTIONS 'scripting': False",
    ),
    (
        OutOfMemoryError,
        "OOM",
        "its memory is full, and it drops nothing, rightly: give it more (maxmemory)",
    ),
    (ReadOnlyError, "READONLY", "it is a replica: name the master"),
    (AuthenticationError, "unauthenticated", "it wants a password"),
)


class Verbs:
    """What one alias asks of its Redis. *transact* carries calls out where scripts may not be run."""

    def __init__(
        self,
        alias: str,
        space: KeySpace,
        options: RedisSettings,
        transact: Callable[..., Conversation[list[Any]]],
        *,
        batch: int = BATCH,
    ) -> None:
        self._alias = alias
        self._space = space
        self._is_fair = "1" if options.fair else ""
        self._replicas = options.wait_replicas
        # Less than what the answer is waited for.
        self._patience = microseconds(options.io_timeout) // 2000
        self._batch = batch
        self._scripts = options.scripting
        self._carry_out = self._script if options.scripting else transact

    def acquire(self, request: Request, *, is_queued: bool) -> Conversation[Grant | Busy]:
        """See BaseLockBackend.try_acquire()."""
        wait: tuple[Command, ...] = ()
        if self._replicas:
            wait = (("WAIT", self._replicas, self._patience),)
        answer, *replicas = yield from self._call(
            ACQUIRE,
            request,
            "s" if request.shared else "x",
            *map(microseconds, (request.ttl, request.min_hold, request.lock_delay)),
            printable(request.name, LONGEST_LISTED),
            request.holder.to_json(),
            "1" if is_queued else "",
            self._is_fair,
            after=wait,
        )
        if wait and answer[0] == 1 and replicas[0] != self._replicas:
            yield from self._refuse_unconfirmed(request, replicas[0])
        return replies.granted(answer)

    def _refuse_unconfirmed(self, request: Request, confirmed: Any) -> Conversation[None]:
        if isinstance(confirmed, int) and confirmed > self._replicas:
            return
        yield from self.release(request)
        problem = (
            f"{confirmed} of {self._replicas} replicas (OPTIONS 'wait_replicas') confirmed the lock"
        )
        raise LockBackendError(self._alias, problem)

    def release(self, request: Request) -> Conversation[Release]:
        """See BaseLockBackend.release()."""
        (answer,) = yield from self._call(RELEASE, request, "")
        return replies.released(answer)

    def revoke(self, requests: Sequence[Request]) -> Conversation[list[Release | Exception]]:
        """See BaseLockBackend.revoke_all(); whatever of these owners arrives late is refused."""
        outcomes: list[Release | Exception] = []
        for first in range(0, len(requests), BATCH):
            calls = [
                self._made(RELEASE, request, "1") for request in requests[first : first + BATCH]
            ]
            outcomes += map(self._revoked, (yield from self._together(calls)))
        return outcomes

    def _revoked(self, answer: Any) -> Release | Exception:
        try:
            return replies.released(self._checked(answer))
        except LockBackendError as error:
            return error

    def extend(self, requests: Sequence[Request]) -> Conversation[list[bool]]:
        """See BaseLockBackend.extend()."""
        kept: list[bool] = []
        for first in range(0, len(requests), self._batch):
            some = requests[first : first + self._batch]
            keys = [self._space.of(request.key) for request in some]
            names = tuple(key for each in keys for key in (each.record, each.holders))
            args = [arg for request in some for arg in (request.owner, microseconds(request.ttl))]
            (answer,) = yield from self._carry_out(Call(EXTEND, names, tuple(args)))
            kept += [one == 1 for one in self._checked(answer)]
        return kept

    def take_over(self, request: Request, former: str) -> Conversation[bool]:
        """See BaseLockBackend.take_over()."""
        args = former, microseconds(request.ttl), request.holder.to_json()
        (answer,) = yield from self._call(TAKE_OVER, request, *args)
        return bool(answer == 1)

    def probe(self, request: Request) -> Conversation[Busy | None]:
        """See BaseLockBackend.probe()."""
        (answer,) = yield from self._look_at([request.key])
        return replies.occupied(self._checked(answer))

    def held(self, keys: Sequence[str]) -> Conversation[list[tuple[Held, str]]]:
        """Tell who holds the locks *keys*: for people, and the owners."""
        answers = yield from self._look_at(keys)
        held = (
            replies.held(self._checked(answer), key)
            for key, answer in zip(keys, answers, strict=True)
        )
        return [each for found in held for each in found]

    def force(self, key: str, owner: str) -> Conversation[bool]:
        """End a holding for its operator; tell whether it was there."""
        keys = self._space.of(key)
        (answer,) = yield from self._carry_out(Call(FORCE, keys.all, (keys.bells, owner)))
        return bool(self._checked(answer) == 1)

    def keep(self, waiters: Sequence[Request]) -> Conversation[None]:
        """Have *waiters* for one lock be alive, and whoever could have it rung."""
        keys = self._space.of(waiters[0].key)
        places = [f"{'s' if waiter.shared else 'x'}{waiter.owner}" for waiter in waiters]
        (answer,) = yield from self._carry_out(Call(KEEP, keys.all, (keys.bells, *places)))
        self._checked(answer)

    def leave(self, request: Request) -> Conversation[None]:
        """See BaseLockBackend.dequeue()."""
        yield from self._call(LEAVE, request)

    def _call(
        self, script: Any, request: Request, *args: Any, after: Any = ()
    ) -> Conversation[list[Any]]:
        call = self._made(script, request, *args)
        answer, *more = yield from self._carry_out(call, *after)
        return [self._checked(answer), *more]

    def _made(self, script: Any, request: Request, *args: Any) -> Call:
        keys = self._space.of(request.key)
        return Call(script, keys.all, (keys.bells, request.owner, *args))

    def _look_at(self, keys: Sequence[str]) -> Conversation[list[Any]]:
        looks = [
            Call(LOOK, each.all, (each.bells,)) for each in (self._space.of(key) for key in keys)
        ]
        return (yield from self._together(looks))

    def _together(self, calls: Sequence[Call]) -> Conversation[list[Any]]:
        """Carry out calls that may be carried out twice, in one go."""
        if not self._scripts:
            return (yield from self._one_by_one(calls))
        answers = yield tuple(call.by_sha for call in calls)
        if any(isinstance(answer, NoScriptError) for answer in answers):
            answers = yield tuple(call.by_text for call in calls)
        return answers

    def _one_by_one(self, calls: Sequence[Call]) -> Conversation[list[Any]]:
        answers = []
        for call in calls:
            answers += yield from self._carry_out(call)
        return answers

    def _script(self, call: Call, *after: Command) -> Conversation[list[Any]]:
        answers = yield (call.by_sha, *after)
        if isinstance(answers[0], NoScriptError):
            answers = yield (call.by_text, *after)
        return answers

    def _checked(self, answer: Any) -> Any:
        if not isinstance(answer, ResponseError):
            return answer
        text = str(answer)
        hints = (
            f": {hint}" for kind, word, hint in _HINTS if isinstance(answer, kind) or word in text
        )
        raise LockBackendError(self._alias, f"Redis refused: {text}{next(hints, '')}") from answer
