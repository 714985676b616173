"""The address and login of a Redis, from a URL or a cache alias; and the OPTIONS of locks on Redis."""

from __future__ import annotations

import inspect
import re
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from redis import connection as driver
from redis.asyncio.cluster import RedisCluster as AsyncRedisCluster
from redis.asyncio.connection import (
    ConnectionPool as AsyncConnectionPool,
    SSLConnection as AsyncSSLConnection,
    parse_url as parse_async_url,
)
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import SentinelManagedSSLConnection as AsyncMasterSSLConnection
from redis.backoff import NoBackoff
from redis.cluster import REDIS_ALLOWED_KEYS, RedisCluster
from redis.connection import ConnectionPool, SSLConnection
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError, RedisError
from redis.retry import Retry
from redis.sentinel import SentinelManagedSSLConnection

from django_distlock.conf import check_values
from django_distlock.exceptions import first_line

try:
    from redis.driver_info import DriverInfo
except ImportError:  # an older redis-py
    _NAMED: dict[str, Any] = {}
else:
    # Made once: otherwise redis-py reads its own version from disk for each new connection.
    _NAMED = {"driver_info": DriverInfo()}

AnyRetry = Retry | AsyncRetry

#: Settings of a cache that locks ignore, because they have their own timeouts and retries.
_OURS = frozenset(
    {
        "socket_timeout", "socket_connect_timeout", "timeout", "retry", "retry_on_timeout",
        "retry_on_error", "max_connections", "connection_class", "decode_responses", "encoding",
        "encoding_errors", "parser_class", "protocol", "health_check_interval", "pool_class",
        "queue_class", "serializer", "is_master", "check_connection",
    }
)  # fmt: skip

#: Settings that come from the URL of a server.
_IN_URL = frozenset({"host", "port", "path", "db"})

#: Seconds that a server has to write a lock to its disk: with ``appendfsync everysec`` it begins to write once a second.
DISK = 2.0

#: No limit of ours: the server refuses connections when there are too many.
MOST_CONNECTIONS = 2**31


@dataclass(frozen=True, slots=True)
class Source:
    """One Redis, the master *service* of *sentinels*, or the cluster with the server *url*.

    *settings* are redis-py's, without timeouts: these are *connect_timeout* and *io_timeout*, in seconds;
    *disk_timeout* is added to the second for the answers to locks.
    """

    url: str = field(repr=False)
    connect_timeout: float
    io_timeout: float
    disk_timeout: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    sentinels: tuple[tuple[str, int], ...] = ()
    sentinel_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    is_cluster: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", re.sub(r"^valkey(s?)://", r"redis\1://", self.url))
        try:
            database = _read_url(self.url).get("db", 0)
        except ValueError as error:
            msg = "a Redis is named by a URL: redis://, rediss://, valkey://, valkeys:// or unix://"
            # The text of the original error may contain a part of the password.
            if "@" in self.url:
                msg += ". What is special in a password is quoted (%23 for #)"
            elif self.url.startswith(("redis", "unix")):
                msg += f". {error}"
            raise ValueError(msg) from None
        if self.is_cluster and database:
            raise ValueError(f"a Redis Cluster has database 0 only, not {database}")
        if provider := self.settings.get("credential_provider"):
            settings = {**self.settings, "credential_provider": _Credentials(provider)}
            object.__setattr__(self, "settings", settings)

    @property
    def where(self) -> str:
        if self.sentinels:
            return f"Redis (the master of {self.service!r}, by Sentinel)"
        return f"Redis{' Cluster' if self.is_cluster else ''} at {self.address}"

    @property
    def address(self) -> str:
        """The address of the server, or the addresses of the Sentinels."""
        if self.sentinels:
            return ", ".join(f"{host}:{port}" for host, port in self.sentinels)
        known = _read_url(self.url)
        return known.get("path") or f"{known.get('host', 'localhost')}:{known.get('port', 6379)}"

    @property
    def identity(self) -> Hashable:
        """Where the keys are: the server, or the Sentinels and their master, and the database."""
        return self.url, self.sentinels, self.settings.get("db")

    @property
    def service(self) -> str:
        return str(_read_url(self.url).get("host", ""))

    @property
    def connection(self) -> dict[str, Any]:
        tls = SSLConnection, SentinelManagedSSLConnection
        return self._of_pool(_read_url(self.url), self._limits(Retry), tls)

    @property
    def async_connection(self) -> dict[str, Any]:
        tls = AsyncSSLConnection, AsyncMasterSSLConnection
        # Many tasks that connect at once may keep the event loop busy for longer than the limit of a connect.
        limits = {**self._limits(AsyncRetry), "socket_connect_timeout": None}
        return self._of_pool(dict(parse_async_url(self.url)), limits, tls)

    def cluster_settings(self, retry: type[AnyRetry]) -> dict[str, Any]:
        limits = self._limits(retry)
        if retry is AsyncRetry:
            # A longer limit, as above, but less than connects_within, so that a node that hangs is passed over.
            limits["socket_connect_timeout"] = self.io_timeout
        return {**_NAMED, **self.settings, **limits}

    def sentinel_settings(self, retry: type[AnyRetry]) -> dict[str, Any]:
        # A limit for asyncio, too, so that the next Sentinel is asked: no task cancels the request, which all tasks share.
        limits = {**self._limits(retry), "socket_timeout": self.io_timeout}
        return {**_NAMED, **self.sentinel_kwargs, **limits}

    @property
    def answers_within(self) -> float:
        """Seconds until a request without an answer fails."""
        return self.io_timeout + self.disk_timeout

    @property
    def connects_within(self) -> float:
        """Seconds that a task waits for a new connection: time for the server, and for each Sentinel that may hang."""
        return (self.connect_timeout + self.io_timeout) * (1 + len(self.sentinels))

    def _limits(self, retry: type[AnyRetry]) -> dict[str, Any]:
        return {
            "socket_connect_timeout": self.connect_timeout,
            # For asyncio, the user of a connection sets the timeout.
            "socket_timeout": None if retry is AsyncRetry else self.answers_within,
            "retry": retry(NoBackoff(), 0),
            "protocol": 2,  # RESP 2 saves the HELLO of each new connection
            "max_connections": MOST_CONNECTIONS,
        }

    def _of_pool(
        self, url: dict[str, Any], limits: dict[str, Any], tls: tuple[Any, Any]
    ) -> dict[str, Any]:
        usable = {k: v for k, v in url.items() if k not in _OURS or k == "connection_class"}
        known = {**_NAMED, **usable, **self.settings, **limits}
        if self.sentinels:
            if known.get("connection_class") is tls[0]:
                known["connection_class"] = tls[1]
            # The Sentinels have the address.
            known.pop("host", None)
            known.pop("port", None)
        return known


class _Credentials(CredentialProvider):
    """Wraps the credential provider of a project: any error of it becomes an AuthenticationError."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider

    def get_credentials(self) -> Any:
        try:
            return self._provider.get_credentials()
        except Exception as error:
            raise self._failed(error) from error

    async def get_credentials_async(self) -> Any:
        try:
            return await self._provider.get_credentials_async()
        except Exception as error:
            raise self._failed(error) from error

    @staticmethod
    def _failed(error: Exception) -> AuthenticationError:
        return AuthenticationError(f"its credential provider failed: {first_line(error)}")


def source_of_url(url: str, options: Mapping[str, Any], **limits: Any) -> Source:
    """Return the Source of the server *url*; *options* are for redis-py, *limits* are the time limits of the Source.

    Raise ValueError if redis-py does not take the options, for threads or for asyncio.
    """
    for name in options:
        if name in _OURS | _IN_URL:
            problem = "the URL has it" if name in _IN_URL else "locks have their own"
            raise ValueError(f"'options' cannot have {name!r}: {problem}.")
    source = Source(url, settings=options, **limits)
    with _refused("'options', or the query of the URL" if "?" in url else "'options'"):
        if source.is_cluster:
            _compare_with_clients(source)
        else:
            _make_connection(ConnectionPool(**source.connection))
            _make_connection(AsyncConnectionPool(**source.async_connection))
    return source


@contextmanager
def _refused(what: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, RedisError) as error:
        raise ValueError(f"{what}: redis-py does not take them: {first_line(error)}.") from error


def _make_connection(pool: ConnectionPool | AsyncConnectionPool) -> None:
    """Make a connection object without connecting, to check its arguments."""
    pool.connection_class(**pool.connection_kwargs)


def _compare_with_clients(source: Source) -> None:
    """Raise ValueError for a setting that a cluster's client does not have, without making one: it would connect."""
    of_threads = {*inspect.signature(RedisCluster).parameters, *REDIS_ALLOWED_KEYS}
    known = of_threads & inspect.signature(AsyncRedisCluster).parameters.keys()
    if unknown := sorted(source.settings.keys() - known):
        raise ValueError(f"its clients of clusters have no {unknown[0]!r}")


def source_of_cache(settings: Mapping[str, Any], *, is_cluster: bool, **limits: float) -> Source:
    """Return the Source of the cache with these *settings* (an alias of CACHES): of several servers, the first."""
    options = dict(settings.get("OPTIONS", {}))
    location = settings.get("LOCATION", "")
    servers = re.split(r"[;,]", location) if isinstance(location, str) else list(location)
    if not servers or not servers[0]:
        raise ValueError("the cache has no LOCATION")
    # django-redis has names of its own; Django's cache passes all options to redis-py.
    known = {
        key.lower(): options[key] for key in ("USERNAME", "PASSWORD", "DB") if options.get(key)
    }
    known |= options.get("CONNECTION_POOL_KWARGS", {})
    known |= {key: value for key, value in options.items() if key.islower()}
    source = Source(
        url=servers[0].strip(),
        **limits,
        settings={key: value for key, value in known.items() if key not in _OURS},
        sentinels=tuple((host, int(port)) for host, port in options.get("SENTINELS", ())),
        sentinel_kwargs=options.get("SENTINEL_KWARGS") or {},
        is_cluster=is_cluster or "cluster" in str(options.get("REDIS_CLIENT_CLASS", "")).lower(),
    )
    if not source.is_cluster:
        with _refused("the cache's OPTIONS"):
            # Without Sentinels, because a connection made with them would ask them for the address.
            _make_connection(ConnectionPool(**replace(source, sentinels=()).connection))
    return source


def _read_url(url: str) -> dict[str, Any]:
    known: dict[str, Any] = driver.parse_url(url)  # type: ignore[no-untyped-call] # it has no types
    return known


def check_connection_options(options: object) -> None:
    """Raise TypeError, which shows no password, if *options* are not keyword arguments."""
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise TypeError("'options' must be a dict of redis-py's keyword arguments.")
    provider = options.get("credential_provider")
    if provider is not None and not hasattr(provider, "get_credentials"):
        raise TypeError(
            "'options': 'credential_provider' must be an object with get_credentials()."
        )


@dataclass(frozen=True, kw_only=True)
class RedisSettings:
    """The common OPTIONS of backends on Redis. Times are in seconds."""

    fair: bool = False
    scripting: bool = True
    wait_replicas: int = 0
    wait_disk: bool = False
    cluster: bool = False
    allow_eviction: bool = False
    connect_timeout: float = 0.25
    io_timeout: float = 1.0

    @property
    def limits(self) -> dict[str, float]:
        """The time limits of a Source."""
        return {
            "connect_timeout": self.connect_timeout,
            "io_timeout": self.io_timeout,
            "disk_timeout": DISK if self.wait_disk else 0.0,
        }

    def __post_init__(self) -> None:
        check_values(self)
        replicas = self.wait_replicas
        if isinstance(replicas, bool) or not isinstance(replicas, int):
            raise TypeError(f"'wait_replicas' must be a whole number, not {replicas!r}.")
        if replicas < 0:
            raise ValueError(f"'wait_replicas' must be 0 or more, not {replicas!r}.")
        for option in ("wait_replicas", "wait_disk") if self.cluster else ():
            if getattr(self, option):
                raise ValueError(f"{option!r} cannot be used with a cluster.")
        if self.cluster and not self.scripting:
            raise ValueError("'scripting' cannot be False with a cluster.")
        if self.fair and not self.scripting:
            raise ValueError("'fair' needs scripts: 'scripting' cannot be False.")


@dataclass(frozen=True, kw_only=True)
class RedisOptions(RedisSettings):
    """The OPTIONS of RedisBackend. *location* is a URL; it and *options*, for redis-py, may hold a password."""

    location: str = field(default="redis://127.0.0.1:6379/0", repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.location, str):
            raise TypeError(f"'location' must be a URL, not {type(self.location).__name__}.")
        check_connection_options(self.options)


@dataclass(frozen=True, kw_only=True)
class RedisCacheOptions(RedisSettings):
    """The OPTIONS of CacheBackend if its alias is a Redis. *cache* is an alias of CACHES."""

    cache: str = "default"
