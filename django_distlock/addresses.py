"""An alias of DISTLOCK that is written as a URL, such as ``"redis://cache:6379/0?ttl=60"``."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode

if TYPE_CHECKING:
    from collections.abc import Callable

#: The keys of an alias that a query may set; all other words are options of the backend.
_TERMS = {"ttl", "timeout", "key_prefix", "strict"}
#: The options of Redis that are not redis-py's, which may be in the query of its URL, too.
REDIS_OPTIONS = {
    "fair", "scripting", "wait_replicas", "wait_disk", "cluster", "allow_eviction",
    "connect_timeout", "io_timeout",
}  # fmt: skip
#: The keys and options that are text, even text that looks like a number.
TEXTS = {
    "acl", "ca", "ca_cert", "cache", "cert", "certfile", "endpoints", "hosts", "key", "key_password", "key_prefix",
    "keyfile", "keyfile_password", "namespace", "password", "root", "server", "user", "using",
}  # fmt: skip
#: By scheme: the names that people write instead by mistake.
_MEANT = {
    "database": "postgres postgresql postgis mysql mariadb sqlite sqlite3 db pgsql psycopg",
    "etcd": "http etcd3",
    "etcds": "https",
    "zookeeper": "zk kazoo",
    "memcached": "memcache pymemcache",
    "redlock+redis": "redlock",
    "cache": "caches django-redis redis+sentinel redis-sentinel sentinel",
    "redis": "redis+cluster redis-cluster",
    "unix": "redis+socket",
}
#: By scheme: what follows it.
_BEHIND = {
    "cache": ", with an alias of CACHES behind it",
    "database": ", with an alias of DATABASES behind it",
}
_WORDS = {"true": True, "false": False, "none": None}
_NUMBER = re.compile(r"\d+(\.\d+)?")
# Not urlsplit(), which takes several hosts with commas between them for one host. No @ may follow the hosts: the text
# before that @ may be the rest of a password.
_URL = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+-]*)://((?P<login>[^/?#]*)@)?(?P<hosts>[^/?#@]*)(/(?P<path>[^?#@]*))?(\?(?P<query>[^#@]*))?",
    re.IGNORECASE,
)


class Address(NamedTuple):
    """The parts of a URL, still percent-encoded, except *query*."""

    scheme: str
    login: str
    hosts: str
    path: str
    query: dict[str, str]

    @property
    def options(self) -> dict[str, Any]:
        """The options of the backend in the query."""
        return {word: _read(word, text) for word, text in self.query.items() if word not in _TERMS}

    @property
    def user(self) -> tuple[str, str]:
        """The user and the password."""
        user, _colon, password = self.login.partition(":")
        return unquote(user), unquote(password)

    def server(self, scheme: str, host: str) -> str:
        """Return the URL of the server *host*, with the login and the path of this address."""
        login, path = f"{self.login}@" if self.login else "", f"/{self.path}" if self.path else ""
        return f"{scheme}://{login}{host}{path}"


def from_url(text: str) -> dict[str, Any]:
    """Return the settings of an alias from the URL *text*; ValueError, which hides the password, for a wrong URL."""
    text = text.strip()  # a text that was read from a file ends with a new line
    known = _URL.fullmatch(text)
    if known is None and "://" in text:
        quoted = "%23 stands for #, %2F for /, %3F for ?, %40 for @"
        raise ValueError(f"is a URL with a character that must be quoted: {quoted}.")
    if known is None:
        [begin] = re.findall(r"^[\w+.-]+", text) or [""]
        raise ValueError(f"must be a dict or a URL. {_advice(begin)}")
    scheme = known["scheme"].lower()
    if scheme not in _MAKE:
        raise ValueError(f"has a URL that begins with {scheme}://. {_advice(scheme)}")
    query = {word.lower(): value for word, value in parse_qsl(known["query"] or "", True)}
    address = Address(scheme, known["login"] or "", known["hosts"], known["path"] or "", query)
    backend, make = _MAKE[scheme]
    terms = {word.upper(): _read(word, query[word]) for word in _TERMS & query.keys()}
    return {"BACKEND": f"django_distlock.backends.{backend}", "OPTIONS": make(address), **terms}


def _advice(scheme: str) -> str:
    """Return what to write instead of *scheme*, or of a text that is not a URL."""
    if "." in scheme:
        return f'Write a class as {{"BACKEND": "{scheme}"}}.'
    meant = next((right for right, wrong in _MEANT.items() if scheme.lower() in wrong.split()), "")
    for near in [meant] if meant else get_close_matches(scheme.lower(), _MAKE, 1):
        return f"Write {near}://{_BEHIND.get(near, '')}."
    begins = ", ".join(f"{known}://" for known in _MAKE)
    return f"One begins with {begins}."


def _read(word: str, text: str) -> Any:
    """Return the value of the key or option *word*."""
    if word in TEXTS:
        return text
    if _NUMBER.fullmatch(text):
        return float(text) if "." in text else int(text)
    return _WORDS.get(text.lower(), text)


def _redis(url: Address) -> dict[str, Any]:
    ours = {word: value for word, value in url.options.items() if word in REDIS_OPTIONS}
    others = {word: url.query[word] for word in url.options if word not in REDIS_OPTIONS}
    location = url.server(url.scheme, url.hosts)
    return {"location": f"{location}?{urlencode(others)}" if others else location, **ours}


def _redlock(url: Address) -> dict[str, Any]:
    scheme = url.scheme.partition("+")[2]
    servers = [url.server(scheme, host) for host in url.hosts.split(",")]
    return {"servers": servers, **url.options}


def _memcached(url: Address) -> dict[str, Any]:
    if url.login:
        raise ValueError("has a user or a password, which locks on memcached do not send.")
    server = url.hosts or (f"unix:/{unquote(url.path)}" if url.path else "127.0.0.1:11211")
    return {"cache": None, "server": server, **url.options}


def _etcd(url: Address) -> dict[str, Any]:
    scheme = "https" if url.scheme == "etcds" else "http"
    found: dict[str, Any] = {}
    if url.hosts:
        found["endpoints"] = [f"{scheme}://{host}" for host in url.hosts.split(",")]
    if url.login:
        found["user"], found["password"] = url.user
    if url.path:
        found["namespace"] = unquote(url.path)
    return {**found, **url.options}


def _zookeeper(url: Address) -> dict[str, Any]:
    found: dict[str, Any] = {"hosts": url.hosts} if url.hosts else {}
    if url.login:
        found["auth"] = [("digest", unquote(url.login))]
    if url.path:
        found["root"] = f"/{unquote(url.path)}"
    return {**found, **url.options}


def _alias(option: str) -> Callable[[Address], dict[str, Any]]:
    def make(url: Address) -> dict[str, Any]:
        return {**({option: unquote(url.hosts)} if url.hosts else {}), **url.options}

    return make


#: By scheme: the backend, and the function that makes its options.
_MAKE: dict[str, tuple[str, Callable[[Address], dict[str, Any]]]] = {
    **dict.fromkeys(
        ("redis", "rediss", "valkey", "valkeys", "unix"), ("redis.RedisBackend", _redis)
    ),
    **dict.fromkeys(("redlock+redis", "redlock+rediss"), ("redlock.RedlockBackend", _redlock)),
    "memcached": ("memcached.CacheMemcachedBackend", _memcached),
    **dict.fromkeys(("etcd", "etcds"), ("etcd.EtcdBackend", _etcd)),
    "zookeeper": ("zookeeper.ZooKeeperBackend", _zookeeper),
    "database": ("database.DatabaseBackend", _alias("using")),
    "rowlock": ("rowlock.RowLockBackend", _alias("using")),
    "advisory": ("advisory.AdvisoryBackend", _alias("using")),
    "cache": ("cache.CacheBackend", _alias("cache")),
    "memory": ("locmem.LocMemBackend", lambda url: url.options),
}
