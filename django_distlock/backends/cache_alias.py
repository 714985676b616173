"""What an alias of CACHES is: its class, its keys, and what clears it. Nothing is asked of its server."""

from __future__ import annotations

import hashlib
import math
import re
from typing import TYPE_CHECKING, Any

from django.core.cache import DEFAULT_CACHE_ALIAS, caches
from django.core.checks import Warning as CheckWarning
from django.utils.module_loading import import_string

from django_distlock.exceptions import InvalidLockBackend

if TYPE_CHECKING:
    from django.core.cache import BaseCache
    from django.core.checks import CheckMessage

    from django_distlock.conf import BackendSettings

#: Seconds between which a server that counts in whole ones keeps a ttl as it is meant: memcached
#: takes more than 30 days for a date.
LEAST_TTL, LONGEST_TTL = 2.0, 29 * 86_400.0
#: What every cache takes as it is: memcached's limits, which Django warns of for all of them.
LONGEST_KEY = 250
_PLAIN = re.compile(r"[\x21-\x7e]+", re.ASCII)
_UNSAFE = re.compile(r"[^\x21-\x7e]+", re.ASCII)
_STUB = 60


def checked_cache(name: object) -> str:
    """Return *name* if CACHES has it; TypeError or ValueError if it does not."""
    if not isinstance(name, str):
        msg = f"'cache' must be a str, not {name!r}."
        raise TypeError(msg)
    if name not in caches.settings:
        msg = f"'cache' names {name!r}, but CACHES has {', '.join(map(repr, caches.settings))}."
        raise ValueError(msg)
    return name


def cache_class(name: str) -> type[BaseCache]:
    """Return the class of the alias *name*; ValueError if it cannot be imported."""
    path = caches.settings[name]["BACKEND"]
    try:
        found: type[BaseCache] = import_string(path)
    except ImportError as error:
        msg = f"'cache' names {name!r}, whose BACKEND {path!r} cannot be imported: {error}."
        raise ValueError(msg) from error
    return found


def dotted_path(kind: type[Any]) -> str:
    """Return where *kind* is to be found."""
    return f"{kind.__module__}.{kind.__qualname__}"


def paths(kind: type[Any]) -> set[str]:
    """Return the dotted paths of *kind* and of the classes that it is made from."""
    return set(map(dotted_path, kind.__mro__))


def own_instance(name: str) -> BaseCache:
    """Return an instance of the alias *name* for its settings and keys alone: it is never connected."""
    try:
        made: BaseCache = caches.create_connection(name)
    except ImportError as error:
        msg = f"'cache' names {name!r}, which needs a driver that is not installed: {error}."
        raise ValueError(msg) from error
    return made


def plain_key(key: str, room: int = LONGEST_KEY) -> str:
    """Return *key* if it is plain and fits into *room*, else a readable stub and its SHA-256."""
    if len(key) <= room and _PLAIN.fullmatch(key):
        return key
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{_UNSAFE.sub('-', key)[:_STUB]}#{digest}"


def whole_seconds(ttl: float) -> int:
    """Return what to ask for so that *ttl* is kept by servers that expire up to a second early."""
    return math.ceil(ttl) + 1


def check_ttl(ttl: float) -> None:
    """Raise ValueError for a ttl that cannot be kept in whole seconds."""
    if not LEAST_TTL <= ttl <= LONGEST_TTL:
        msg = (
            f"a ttl (and max_hold) must be {LEAST_TTL:g} seconds to {LONGEST_TTL / 86_400:g} days "
            f"here, where the server counts in whole seconds, not {ttl!r}."
        )
        raise ValueError(msg)


def check_ttl_setting(settings: BackendSettings) -> None:
    """See check_ttl(); InvalidLockBackend names the alias."""
    try:
        check_ttl(settings.ttl)
    except ValueError as error:
        raise InvalidLockBackend(f"DISTLOCK[{settings.alias!r}]: TTL: {error}") from error


def check_clearing(alias: str, name: str, *, server: str | None = None) -> list[CheckMessage]:
    """Warn if the locks of *alias* are lost when the default cache is cleared.

    *server* is where they live, if not where the cache *name* does.
    """
    if name != DEFAULT_CACHE_ALIAS and not _is_cleared(server or _location(name)):
        return []
    text = (
        f"DISTLOCK[{alias!r}]: its locks live in the cache {name!r}, where "
        f"the {DEFAULT_CACHE_ALIAS!r} cache lives too: cache.clear() drops them while they are held."
    )
    hint = "Give locks an alias in CACHES and a server (on Redis, a database) of their own."
    return [CheckWarning(text, hint=hint, id="distlock.W010")]


def _is_cleared(location: object) -> bool:
    """Return whether the default cache has one of these servers: cleared are all that it has."""
    return bool(_places(location) & _places(_location(DEFAULT_CACHE_ALIAS)))


def _location(name: str) -> object:
    return caches.settings.get(name, {}).get("LOCATION")


def _places(location: object) -> set[str]:
    """Return the servers that a LOCATION names, in whatever form."""
    if isinstance(location, list | tuple):
        return set(map(str, location))
    return set(re.split("[;,]", str(location))) if location else set()
