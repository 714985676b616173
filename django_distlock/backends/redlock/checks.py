"""What `manage.py check` says of the servers of a majority."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.core.checks import CheckMessage, Error, Warning as CheckWarning

from django_distlock.backends.redis.checks import check_server
from django_distlock.exceptions import LockBackendError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django_distlock.backends.redis.connections import Conversation, PoolLink

    from .options import RedlockOptions


def check_guard(where: str, options: RedlockOptions) -> list[CheckMessage]:
    """Say whether a restart can let a second holder in; the settings alone tell."""
    if options.restart_guard or options.durable:
        return []
    text = f"{where}: 'restart_guard' is off: a server that restarts without its data lets a second holder in."
    hint = "Switch it on, or have each server write each change to disk and say 'durable': True."
    return [CheckWarning(text, hint=hint, id="distlock.W030")]


def check_servers(
    where: str, options: RedlockOptions, servers: Sequence[tuple[str, PoolLink]]
) -> list[CheckMessage]:
    """Ask each server, by its name for people and the way to it."""
    found: list[CheckMessage] = []
    runs: dict[str, str] = {}
    for place, link in servers:
        found += check_server(f"{where}: {place}", link, allow_eviction=options.allow_eviction)
        try:
            found += _check_disk(f"{where}: {place}", options, link)
            found += _check_twice(where, place, link, runs)
        except LockBackendError:
            continue  # which was said above
    return found


def _check_disk(where: str, options: RedlockOptions, link: PoolLink) -> list[CheckMessage]:
    if not options.durable:
        return []
    answer = link.converse(_config("append*"))
    hint = "Set appendonly yes and appendfsync always, or leave 'durable' out and rely on 'restart_guard'."
    if not isinstance(answer, list):
        text = f"{where}: 'durable' cannot be checked: CONFIG GET was refused."
        return [CheckWarning(text, hint=hint, id="distlock.W031")]
    known = dict(zip(answer[::2], answer[1::2], strict=True))
    if (known.get(b"appendonly"), known.get(b"appendfsync")) == (b"yes", b"always"):
        return []
    text = (
        f"{where}: OPTIONS say 'durable', but the server may lose what it granted when it restarts."
    )
    return [Error(text, hint=hint, id="distlock.E031")]


def _check_twice(
    where: str, place: str, link: PoolLink, runs: dict[str, str]
) -> list[CheckMessage]:
    run = _run_id(link)
    first = runs.setdefault(run, place)
    if not run or first == place:
        return []
    text = f"{where}: {first} and {place} are one and the same server."
    return [Error(text, hint="Name servers that can fail one by one.", id="distlock.E030")]


def _run_id(link: PoolLink) -> str:
    answer = link.converse(_info())
    text = answer.decode() if isinstance(answer, bytes) else ""
    return dict(line.partition(":")[::2] for line in text.splitlines()).get("run_id", "")


def _info() -> Conversation[object]:
    (answer,) = yield (("INFO", "server"),)
    return answer


def _config(pattern: str) -> Conversation[object]:
    (answer,) = yield (("CONFIG", "GET", pattern),)
    return answer
