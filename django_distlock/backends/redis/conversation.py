"""Conversations with a Redis: generators that do no I/O.

One yields commands, is sent their answers, and returns a result.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

Command = tuple[str | int | float | bytes, ...]
_T = TypeVar("_T")
Conversation = Generator[tuple[Command, ...], list[Any], _T]


def ask(command: Command) -> Conversation[Any]:
    """Send one command; the result is its answer."""
    (answer,) = yield (command,)
    return answer


def talk(conversation: Conversation[_T], exchange: Callable[[Sequence[Command]], list[Any]]) -> _T:
    """Have *conversation* over *exchange*, which sends commands and returns their answers."""
    try:
        commands = next(conversation)
        while True:
            commands = conversation.send(exchange(commands))
    except StopIteration as end:
        result: _T = end.value
        return result


async def atalk(
    conversation: Conversation[_T], exchange: Callable[[Sequence[Command]], Awaitable[list[Any]]]
) -> _T:
    """See talk()."""
    try:
        commands = next(conversation)
        while True:
            commands = conversation.send(await exchange(commands))
    except StopIteration as end:
        result: _T = end.value
        return result
