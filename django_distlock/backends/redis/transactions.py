"""The same without scripts: WATCH, read, decide here, and write if nobody wrote meanwhile (MULTI, EXEC)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redis.exceptions import OutOfMemoryError, ResponseError

from .decisions import decide, reads, removals
from .scripts import LOOK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .conversation import Command, Conversation
    from .scripts import Call

#: How often to begin again since others wrote meanwhile; one of those that write gets through each time.
ROUNDS = 100


def transact(call: Call, *after: Command) -> Conversation[list[Any]]:
    """Carry *call* out as its script would, and return its answer and those to *after*.

    Two round trips; one to look. An error of Redis is an answer: nothing was carried out then.
    """
    attempt = _look if call.script is LOOK else _change
    for _ in range(ROUNDS):
        answers = yield from attempt(call, after)
        if answers:
            return answers
    return [ResponseError(f"others wrote meanwhile, {ROUNDS} times in a row")]


def _look(call: Call, after: Sequence[Command]) -> Conversation[list[Any]]:
    """Read, if nobody writes meanwhile; else return no answers."""
    # Not between MULTI and EXEC: a Redis whose memory is full has no place to queue anything.
    asked = _begin(call)
    answers = yield (*asked, ("EXEC",), *after)
    found, done, more = answers[: len(asked)], answers[len(asked)], answers[len(asked) + 1 :]
    if error := _first_error([*found, done]):
        return (yield from _refused(error))
    answer, _ = decide(call, found[1:-1])
    return [answer, *more] if done is not None else []


def _change(call: Call, after: Sequence[Command]) -> Conversation[list[Any]]:
    """Read, decide, and write if nobody wrote meanwhile; else return no answers."""
    found = yield _begin(call)
    if error := _first_error(found):
        return (yield from _refused(error))
    answer, writes = decide(call, found[1:-1])
    # With nothing to write, EXEC still tells whether what was read belongs together.
    answers = yield (*writes, ("EXEC",), *after)
    queued, done, more = answers[: len(writes)], answers[len(writes)], answers[len(writes) + 1 :]
    if error := _first_error([*queued, done, *(done if isinstance(done, list) else ())]):
        return (yield from _refused(error, answer, removals(call)))
    return [answer, *more] if done is not None else []


def _begin(call: Call) -> tuple[Command, ...]:
    # MULTI already here: were it refused among the writes, they would be carried out unguarded.
    return ("WATCH", *call.keys), *reads(call), ("MULTI",)


def _refused(
    error: ResponseError, answer: Any = None, removals: Sequence[Command] = ()
) -> Conversation[list[Any]]:
    """Leave the connection as it was found; what only frees memory is carried out even if it is full."""
    # They fail where a transaction has ended, or has not begun: nobody minds.
    yield (("DISCARD",), ("UNWATCH",))
    if not (removals and isinstance(error, OutOfMemoryError)):
        return [error]
    answers = yield tuple(removals)
    return [_first_error(answers) or answer]


def _first_error(answers: Sequence[Any]) -> ResponseError | None:
    return next((answer for answer in answers if isinstance(answer, ResponseError)), None)
