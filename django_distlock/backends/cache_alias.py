"""Locks as keys of an alias in CACHES: its class, keys and values, and what clears it. No I/O."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

from django.core.cache import DEFAULT_CACHE_ALIAS, BaseCache, caches
from django.core.checks import CheckMessage, Warning as CheckWarning
from django.utils.module_loading import import_string

from django_distlock.conf import BackendSettings, shown_alias
from django_distlock.engine.values import Busy, Recent, Secret
from django_distlock.engine.waiting import Waiting, Way
from django_distlock.exceptions import InvalidLockBackend
from django_distlock.ground.holder import Holder
from django_distlock.ground.naming import LONGEST_MARK, printable

from .base import BaseLockBackend

#: The limits of a ttl in seconds, on servers that count in whole seconds: memcached takes a ttl of
#: more than 30 days for a date.
LEAST_TTL, LONGEST_TTL = 2.0, 29 * 86_400.0
#: The longest key that every cache accepts: memcached's limit, about which Django warns for all caches.
LONGEST_KEY = 250
_PLAIN = re.compile(r"[\x21-\x7e]+", re.ASCII)
_UNSAFE = re.compile(r"[^\x21-\x7e]+", re.ASCII)
_STUB = 60
#: A URL of Redis without a query.
_REDIS = re.compile(
    r"(?:redis|valkey)s?://(?:[^@/?]*@)?(?P<host>[^/?]*?)(?::(?P<port>\d+))?(?:/(?P<database>\d*))?"
)
#: Characters of a lock's name that are stored for people who look into the cache.
_LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class Record:
    """The value of a key. *ends* is a time on the lease clock of the owner's machine."""

    owner: str = field(repr=False)
    ends: float
    name: str
    holder: Holder | None

    def pack(self) -> str:
        # Twice as fast as json.dumps() of a dict.
        owner, name = json.dumps(self.owner), json.dumps(printable(self.name, _LONGEST_NAME))
        holder = json.dumps(self.holder.to_json() if self.holder else "")
        return Secret(
            f'{{"owner": {owner}, "ends": {self.ends}, "holder": {holder}, "name": {name}}}'
        )

    @classmethod
    def unpack(cls, value: Any) -> Record:
        """Return the record in *value*; a foreign value becomes a record without owner and holder."""
        try:
            fields = json.loads(value)
            holder = Holder.from_json(fields["holder"])
            return cls(str(fields["owner"]), float(fields["ends"]), str(fields["name"]), holder)
        except (ValueError, TypeError, KeyError, RecursionError):
            return cls("", 0.0, "", None)

    @property
    def busy(self) -> Busy:
        return Busy(self.holder, mark=self.owner)


class CacheKeyBackend(BaseLockBackend):
    """Keeps each lock as one key of a cache, on a server that counts in whole seconds."""

    kind = "distlock"
    waiting = Waiting(way=Way.LOOK)

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self.location = "cache", self.options.cache
        self._released = Recent()
        try:
            self.check_ttl(settings.ttl)
        except ValueError as error:
            raise InvalidLockBackend(f"DISTLOCK[{settings.alias!r}]: TTL: {error}") from error

    def check_ttl(self, ttl: float) -> None:
        if not LEAST_TTL <= ttl <= LONGEST_TTL:
            raise ValueError(
                f"a ttl (and max_hold) must be {LEAST_TTL:g} seconds to {LONGEST_TTL / 86_400:g} days "
                f"because the server counts in whole seconds, not {ttl!r}."
            )


def cache_class(name: object) -> type[BaseCache]:
    """Return the class of the alias *name*; ValueError or TypeError if there is none."""
    if not isinstance(name, str):
        raise TypeError(f"'cache' must be a str, not {name!r}.")
    if name not in caches.settings:
        msg = f"'cache' names {shown_alias(name)}, but CACHES has {', '.join(map(repr, caches.settings))}."
        raise ValueError(msg)
    path = caches.settings[name]["BACKEND"]
    try:
        found: type[BaseCache] = import_string(path)
    except ImportError as error:
        msg = f"'cache' names {name!r}, whose BACKEND {path!r} cannot be imported: {error}."
        raise ValueError(msg) from error
    return found


def dotted_path(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def paths(kind: type[Any]) -> set[str]:
    return set(map(dotted_path, kind.__mro__))


def own_instance(name: str) -> BaseCache:
    """Return an instance of the alias *name* that is only used for settings and keys, and never connects."""
    try:
        made: BaseCache = caches.create_connection(name)
    except ImportError as error:
        msg = f"'cache' names {name!r}, which needs a driver that is not installed: {error}."
        raise ValueError(msg) from error
    return made


def plain_key(key: str, room: int = LONGEST_KEY) -> str:
    """Return *key* if it has only plain characters, at most *room*; else a readable stub and the key's SHA-256.

    LONGEST_MARK characters stay free for the number of a place.
    """
    if len(key) <= room - LONGEST_MARK and _PLAIN.fullmatch(key):
        return key
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{_UNSAFE.sub('-', key)[:_STUB]}#{digest}"


def whole_seconds(ttl: float) -> int:
    """Return the ttl to send to a server that may expire a value up to two seconds early.

    memcached reads its clock once a second, in whole seconds: the time that it counts from is up to two seconds old.
    """
    return math.ceil(ttl) + 2


def check_clearing(
    alias: str, name: str | None, *, server: str | None = None, database: object = None
) -> list[CheckMessage]:
    """Warn if clearing the default cache deletes the locks of *alias*.

    The locks are on *server*, in its *database*; without *server*, on all servers of the cache *name*.
    """
    own = {_address(server, database)} if server else _servers(name or "")
    if name != DEFAULT_CACHE_ALIAS and not own & _servers(DEFAULT_CACHE_ALIAS):
        return []
    within = f"in the cache {name!r}, " if name else ""
    text = (
        f"DISTLOCK[{alias!r}]: its locks are {within}on the same server as the "
        f"{DEFAULT_CACHE_ALIAS!r} cache: cache.clear() deletes them while they are held."
    )
    hint = "Give locks a separate server (on Redis, a database), and a separate alias in CACHES."
    return [CheckWarning(text, hint=hint, id="distlock.W010")]


def _servers(name: str) -> set[tuple[str, str]]:
    """Return the servers of the cache *name*, each with its database."""
    settings = caches.settings.get(name, {})
    location, options = settings.get("LOCATION"), settings.get("OPTIONS", {})
    if not isinstance(location, list | tuple):
        location = re.split("[;,]", str(location)) if location else ()
    return {_address(str(each), options.get("db", options.get("DB"))) for each in location}


def _address(location: str, database: object) -> tuple[str, str]:
    """Return the server at *location* and the *database*, unless *location* is a URL with its own database."""
    if (url := _REDIS.fullmatch(location.strip())) is None:
        return location, str(database or 0)
    return f"{url['host']}:{url['port'] or 6379}", url["database"] or str(database or 0)
