"""An alias of DISTLOCK that is written as a URL."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from django.utils.module_loading import import_string
from pytest_django.fixtures import Settings

from django_distlock import addresses, lock
from django_distlock.backends.redis.sources import RedisSettings
from django_distlock.conf import DEFAULT_TIMEOUT, DEFAULT_TTL, read_alias, read_settings
from django_distlock.exceptions import InvalidLockBackend
from django_distlock.handler import make_backend
from django_distlock.testing import override_locks

OF = "django_distlock.backends."
RIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "redis://cache:6379/0": ("redis.RedisBackend", {"location": "redis://cache:6379/0"}),
    "rediss://u:p%23@cache/1?fair=true&ssl_cert_reqs=none&io_timeout=0.5": (
        "redis.RedisBackend",
        {"location": "rediss://u:p%23@cache/1?ssl_cert_reqs=none", "fair": True, "io_timeout": 0.5},
    ),
    "redlock+redis://:secret@a:6379,b,[::1]:6380/3?fencing=true": (
        "redlock.RedlockBackend",
        {
            "servers": [
                "redis://:secret@a:6379/3",
                "redis://:secret@b/3",
                "redis://:secret@[::1]:6380/3",
            ],
            "fencing": True,
        },
    ),
    "memcached://cache:11211?io_timeout=2": (
        "memcached.CacheMemcachedBackend",
        {"cache": None, "server": "cache:11211", "io_timeout": 2},
    ),
    "etcd://root:a%2Fb@one,two:2380/shop/eu?session_timeout=20": (
        "etcd.EtcdBackend",
        {
            "endpoints": ["http://one", "http://two:2380"],
            "user": "root",
            "password": "a/b",
            "namespace": "shop/eu",
            "session_timeout": 20,
        },
    ),
    "etcds://one?user=7&password=0123&namespace=7&verify_certs=false": (
        "etcd.EtcdBackend",
        {
            "endpoints": ["https://one"],
            "user": "7",
            "password": "0123",
            "namespace": "7",
            "verify_certs": False,
        },
    ),
    "zookeeper://me:secret@one,two:2182/locks": (
        "zookeeper.ZooKeeperBackend",
        {"hosts": "one,two:2182", "root": "/locks", "auth": [("digest", "me:secret")]},
    ),
    "database://": ("database.DatabaseBackend", {}),
    "database://other?fair=true": ("database.DatabaseBackend", {"using": "other", "fair": True}),
    "advisory://default?fencing=False": (
        "advisory.AdvisoryBackend",
        {"using": "default", "fencing": False},
    ),
    "cache://sessions": ("cache.CacheBackend", {"cache": "sessions"}),
    "memory://": ("locmem.LocMemBackend", {}),
}


@pytest.mark.parametrize("url", RIGHT)
def test_a_url_names_the_backend_and_its_options(url: str) -> None:
    found = read_alias("a", url)

    assert (found.backend.removeprefix(OF), found.options) == RIGHT[url]
    assert (found.ttl, found.timeout) == (DEFAULT_TTL, DEFAULT_TIMEOUT)


def test_spaces_and_a_new_line_around_it_are_of_the_file_that_it_was_read_from() -> None:
    assert read_alias("a", " redis://cache\n").options == {"location": "redis://cache"}


def test_the_query_also_has_the_terms_of_the_alias() -> None:
    found = read_alias("a", "memory://?ttl=2.5&TIMEOUT=none&key_prefix=2026&strict=true")

    assert (found.ttl, found.timeout, found.key_prefix, found.strict) == (2.5, None, "2026", True)
    assert found.options == {}


@pytest.mark.parametrize(
    "url",
    [
        "redis://cache?fair=true",
        "memcached://cache:11211",
        "etcd://one,two/shop",
        "zookeeper://one,two/shop",
        "redlock+redis://a,b,c?fencing=true",
        "memory://",
    ],
)
def test_a_backend_is_made_of_it(url: str) -> None:
    make_backend(read_alias("a", url)).close()


WRONG = {
    "x": "DISTLOCK['a'] must be a dict or a URL. One begins with redis://, ",
    "": "DISTLOCK['a'] must be a dict or a URL. One begins with redis://, ",
    OF + "redis.RedisBackend": (
        "DISTLOCK['a'] must be a dict or a URL. "
        'Write a class as {"BACKEND": "django_distlock.backends.redis.RedisBackend"}.'
    ),
    "redis:secret@cache": "DISTLOCK['a'] must be a dict or a URL. Write redis://.",
    "redis://u:se#cret@cache": "DISTLOCK['a'] is a URL with a character that must be quoted: %23 stands for #",
    **dict.fromkeys(
        (
            "redis://u:se/cret@cache",
            "redis://:cret/def@cache:6379/0",
            "etcd://root:ab?cret@one:2379/ns",
            "etcd://one?user=root&password=cret@ab",
        ),
        "DISTLOCK['a'] is a URL with a character that must be quoted: %23 stands for #",
    ),
    "postgres://u:secret@db/shop": (
        "DISTLOCK['a'] has a URL that begins with postgres://. "
        "Write database://, with an alias of DATABASES behind it."
    ),
    "zk://one": "DISTLOCK['a'] has a URL that begins with zk://. Write zookeeper://.",
    "rediz://:secret@cache": "DISTLOCK['a'] has a URL that begins with rediz://. Write redis://.",
    **{
        f"{scheme}://one": f"DISTLOCK['a'] has a URL that begins with {scheme}://. Write {right}"
        for scheme, right in {
            "redis+sentinel": "cache://, with an alias of CACHES behind it.",
            "django-redis": "cache://, with an alias of CACHES behind it.",
            "redis+socket": "unix://.",
            "redis+cluster": "redis://.",
        }.items()
    },
    "redis://one?tl=60": "DISTLOCK['a']: OPTIONS: 'options', or the query of the URL: redis-py does not take them: ",
    "memcached://one,two": "DISTLOCK['a']: OPTIONS: 'server' names several servers of memcached",
    "memcached://u:secret@one": "DISTLOCK['a'] has a user or a password, which locks on memcached",
    "memory://?ttl=soon": "DISTLOCK['a']: TTL must be a number of seconds",
    "etcd://one?ttk=3": "DISTLOCK['a']: unknown OPTIONS 'ttk'. It takes ",
    "database://othr": "DISTLOCK['a']: OPTIONS: 'using' names 'othr', but DATABASES has ",
    "redlock+redis://a,b": "DISTLOCK['a']: OPTIONS: 'servers' must be 3, 5 or another odd number",
    "redis://:secret@cache:port": "DISTLOCK['a']: OPTIONS: a Redis is named by a URL",
}


@pytest.mark.parametrize("url", WRONG)
def test_a_wrong_one_is_told_what_is_right_and_shows_no_password(url: str) -> None:
    with pytest.raises(InvalidLockBackend) as raised:
        make_backend(read_alias("a", url))

    assert str(raised.value).startswith(WRONG[url])
    assert "cret" not in str(raised.value)
    assert "cret" not in repr(raised.value.__cause__)


def test_one_url_in_the_place_of_the_aliases_is_told_what_is_right(settings: Settings) -> None:
    settings.DISTLOCK = "redis://:secret@cache"

    with pytest.raises(InvalidLockBackend, match="must be a dict of aliases, like") as raised:
        read_settings()

    assert "secret" not in str(raised.value)


URL = "redis://:secret@cache"


@pytest.mark.parametrize(
    "values",
    [
        {"BACKEND": URL},
        {"OPTIONS": URL},
        {"TEST": URL},
        {"TEST": {"OPTIONS": URL}},
        {"OPTIONS": {"using": URL}},
        {"BACKEND": f"{OF}cache.CacheBackend", "OPTIONS": {"cache": URL}},
    ],
    ids=str,
)
def test_one_in_a_wrong_place_shows_no_password(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidLockBackend) as raised:
        make_backend(read_alias("a", values))

    assert "secret" not in f"{raised.value} {raised.value.__cause__!r}"


def test_an_alias_of_a_database_that_is_no_text_is_shown() -> None:
    with pytest.raises(InvalidLockBackend, match="'using' names None, but DATABASES has"):
        make_backend(read_alias("a", {"OPTIONS": {"using": None}}))


def test_the_options_of_redis_are_those_of_its_backend() -> None:
    assert {option.name for option in fields(RedisSettings)} == addresses.REDIS_OPTIONS


@pytest.mark.parametrize("begin", addresses._MAKE)
def test_options_that_are_text_stay_text(begin: str) -> None:
    backend = import_string(OF + addresses._MAKE[begin][0])

    for option in fields(backend.options_class):
        is_text = str(option.type).startswith("str")
        assert not is_text or option.name in {*addresses.TEXTS, "location"}


def test_locks_are_made_free_for_a_test(settings: Settings) -> None:
    settings.DISTLOCK = {"default": "memory://?ttl=7"}

    with override_locks(free=True), lock("report") as lease, lock("report", reentrant=False):
        assert 6 < (lease.remaining or 0) <= 7
