"""The OPTIONS of locks in a majority of Redis servers, and what `manage.py check` says of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

from django.core.checks import CheckMessage, Error, Warning as CheckWarning

from django_distlock.backends.failures import server_error
from django_distlock.backends.redis.checks import check_facts
from django_distlock.backends.redis.connections import PoolLink, ask
from django_distlock.backends.redis.sources import Source
from django_distlock.conf import check_values, checked_ttl
from django_distlock.exceptions import LockBackendError

FEWEST = 3


@dataclass(frozen=True, kw_only=True)
class RedlockOptions:
    """*servers* are URLs, which may hold passwords, or aliases of CACHES. Times are seconds."""

    servers: Sequence[str] = field(default=(), repr=False)
    fencing: bool = False
    restart_guard: bool = True
    longest_ttl: float | None = None
    durable: bool = False
    server_timeout: float | None = None
    connect_timeout: float | None = None
    allow_eviction: bool = False

    def __post_init__(self) -> None:
        self._check_servers()
        check_values(self)
        if self.longest_ttl is not None:
            checked_ttl(self.longest_ttl, "'longest_ttl'")

    def _check_servers(self) -> None:
        is_list = isinstance(self.servers, (list, tuple))
        if not is_list or not all(isinstance(server, str) for server in self.servers):
            raise TypeError("'servers' must be a list of URLs or of aliases of CACHES.")
        number = len(self.servers)
        if number < FEWEST or number % 2 == 0:
            msg = f"'servers' must be {FEWEST}, 5 or another odd number of servers, not {number}."
            raise ValueError(msg)


def check_guard(where: str, options: RedlockOptions) -> list[CheckMessage]:
    if options.restart_guard or options.durable:
        return []
    text = f"{where}: 'restart_guard' is off: a server that restarts without its data lets a second holder in."
    hint = "Switch it on, or have each server write each change to disk and say 'durable': True."
    return [CheckWarning(text, hint=hint, id="distlock.W030")]


def check_servers(
    where: str, options: RedlockOptions, alias: str, sources: Sequence[Source]
) -> list[CheckMessage]:
    found: list[CheckMessage] = []
    runs: dict[bytes, str] = {}
    for source in sources:
        place = f"{where}: {source.where}"
        with closing(PoolLink(alias, source)) as link:
            try:
                found += check_facts(place, link, allow_eviction=options.allow_eviction)
                found += _check_disk(place, options, link)
                found += _check_twice(where, source.where, link, runs)
            except LockBackendError as error:
                found.append(server_error(error, source.place))
    return found


def _check_disk(where: str, options: RedlockOptions, link: PoolLink) -> list[CheckMessage]:
    if not options.durable:
        return []
    answer = link.converse(ask(("CONFIG", "GET", "append*")))
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
    where: str, place: str, link: PoolLink, runs: dict[bytes, str]
) -> list[CheckMessage]:
    answer = link.converse(ask(("INFO", "server")))
    found = re.search(rb"run_id:(\w+)", answer) if isinstance(answer, bytes) else None
    run = found[1] if found else b""
    first = runs.setdefault(run, place)
    if not run or first == place:
        return []
    text = f"{where}: {first} and {place} are one and the same server."
    return [Error(text, hint="Name servers that can fail one by one.", id="distlock.E030")]
