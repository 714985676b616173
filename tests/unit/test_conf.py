"""Settings that are wrong fail at first use and in `manage.py check`, naming alias and key."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any, cast

import pytest
from django.core.checks import CheckMessage, Error, run_checks
from django.db import connection, transaction
from pytest_django.fixtures import Settings

from django_distlock import InvalidLockBackend, LockNotAcquired, conf, lock, locks, transaction_lock
from django_distlock.backends.database import DatabaseBackend
from django_distlock.backends.dummy import DummyBackend
from django_distlock.backends.locmem import LocMemBackend
from django_distlock.conf import (
    check_values,
    checked_limit,
    checked_ttl,
    optional_seconds,
    read_alias,
    read_settings,
    seconds,
)
from tests.contract.crew import elsewhere
from tests.fixtures import tenancy
from tests.fixtures.tenancy import tenant

LOCMEM = "django_distlock.backends.locmem.LocMemBackend"
DUMMY = "django_distlock.backends.dummy.DummyBackend"
REDIS = "django_distlock.backends.redis.RedisBackend"

#: Wrong aliases, and what is said of them behind "DISTLOCK['a']".
WRONG: list[tuple[Any, str]] = [
    ("x", " must be a dict or a URL."),
    ({"TLL": 1}, ": unknown key 'TLL'."),
    ({"BACKEND": LocMemBackend}, ": BACKEND must"),
    ({"BACKEND": "nowhere.Backend"}, ": BACKEND 'nowhere.Backend' cannot be imported"),
    ({"BACKEND": "decimal.Decimal"}, ": BACKEND 'decimal.Decimal' is not a lock backend."),
    ({"TTL": 0}, ": TTL must be more than 0 seconds"),
    ({"TTL": 0.001}, ": TTL must be at least"),
    ({"TIMEOUT": -1}, ": TIMEOUT must be 0 or more"),
    ({"KEY_PREFIX": 1}, ": KEY_PREFIX must be"),
    (
        {"KEY_PREFIX": "shpo.locks.tenant"},
        ": KEY_PREFIX 'shpo.locks.tenant' is a dotted path that cannot be imported: No module named 'shpo'. If",
    ),
    (
        {"KEY_PREFIX": "tests.fixtures.tenancy.PREFIX"},
        ": KEY_PREFIX 'tests.fixtures.tenancy.PREFIX' is the dotted path of no function.",
    ),
    ({"STRICT": 1}, ": STRICT must be a bool"),
    ({"TEST": None}, ": TEST must be a dict"),
    ({"TEST": {"TTL": 5}}, ": TEST: unknown key 'TTL'. It takes BACKEND, OPTIONS."),
    ({"TEST": {"BACKEND": LocMemBackend}}, ": TEST: BACKEND must be a str"),
    ({"TEST": {"OPTIONS": []}}, ": TEST: OPTIONS must be a dict"),
    ({"OPTIONS": []}, ": OPTIONS must be a dict"),
    ({"OPTIONS": {"usnig": "default"}}, ": unknown OPTIONS 'usnig'."),
    (
        {"BACKEND": LOCMEM, "OPTIONS": {"using": "default"}},
        ": unknown OPTIONS 'using'. It takes none.",
    ),
    ({"OPTIONS": {"using": "nowhere"}}, ": OPTIONS: 'using' names 'nowhere'"),
    ({"OPTIONS": {"fair": "yes"}}, ": OPTIONS: 'fair' must be True or False"),
]


def _checked() -> list[CheckMessage]:
    # Checks of Django's own would connect to databases, and import drivers that are not here.
    return run_checks(tags=["distlock"], databases=[])


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (
            [],
            "DISTLOCK must be a dict of aliases, like {'default': 'redis://cache:6379'}, not list.",
        ),
        ({1: {}}, "DISTLOCK[1]: an alias must be a str that is not empty."),
        *(({"a": alias}, f"DISTLOCK['a']{problem}") for alias, problem in WRONG),
    ],
)
def test_a_wrong_setting_is_told_at_first_use_and_by_check(
    settings: Settings, wrong: Any, problem: str
) -> None:
    settings.DISTLOCK = wrong

    with pytest.raises(InvalidLockBackend) as caught:
        locks["a"]
    [error] = [one for one in _checked() if (one.id or "").startswith("distlock.E")]

    assert str(caught.value).startswith(problem)
    assert isinstance(error, Error)
    assert error.msg == str(caught.value)
    assert error.id == "distlock.E001"
    assert error.hint


@pytest.mark.parametrize(
    ("alias", "hint"),
    [
        ({"ttl": 1}, "STRICT, OPTIONS, TEST: write TTL."),
        ({"LOCATION": "redis://x"}, "TEST: the address of the server is one of its OPTIONS."),
        ({"BACKEND": REDIS, "OPTIONS": {"LOCATION": "redis://x"}}, ": write 'location'."),
        ({"BACKEND": REDIS, "OPTIONS": {"url": "redis://x"}}, ": write 'location'."),
        ({"OPTIONS": {"database": "default"}}, "max_connections, using: write 'using'."),
        ({"OPTIONS": {"timeout": 3}}, ": write TIMEOUT beside OPTIONS."),
    ],
)
def test_a_name_that_is_a_good_guess_is_answered_with_the_right_one(
    settings: Settings, alias: dict[str, Any], hint: str
) -> None:
    settings.DISTLOCK = {"a": alias}

    with pytest.raises(InvalidLockBackend) as caught:
        locks["a"]

    assert str(caught.value).endswith(hint)


def test_check_tells_all_aliases_that_are_wrong(settings: Settings) -> None:
    settings.DISTLOCK = {
        "a": {"BACKEND": "nowhere.Backend"},
        "b": {"OPTIONS": {"x": 1}},
        "c": {"BACKEND": LOCMEM},
    }

    told = [str(one.msg) for one in _checked() if one.id == "distlock.E001"]

    assert [text[:13] for text in told] == ["DISTLOCK['a']", "DISTLOCK['b']"]


@pytest.fixture
def no_setting(settings: Settings) -> Iterator[None]:
    """Take the setting away, which Django tells nobody."""
    del settings.DISTLOCK
    locks.reset()
    yield
    locks.reset()


@pytest.mark.usefixtures("no_setting")
def test_without_the_setting_locks_are_in_the_default_database() -> None:
    known = read_alias("default", read_settings()["default"])

    assert list(locks) == ["default"]
    assert isinstance(locks["default"], DatabaseBackend)
    assert locks["default"].options.using == "default"
    assert (known.ttl, known.timeout, known.key_prefix, known.strict) == (30.0, 10.0, "", False)


def test_an_unknown_alias_is_told_with_those_that_are_known(settings: Settings) -> None:
    settings.DISTLOCK = {"a": {"BACKEND": LOCMEM}, "b": {"BACKEND": LOCMEM}}

    with pytest.raises(InvalidLockBackend, match=r"no alias 'default'; it has 'a', 'b'\."):
        lock("x").acquire()
    with pytest.raises(InvalidLockBackend, match="no alias 'c'"):
        lock("x", using="c").acquire()


def test_what_is_set_is_what_the_backend_has(settings: Settings) -> None:
    settings.DISTLOCK = {
        "a": {
            "BACKEND": LOCMEM,
            "TTL": timedelta(minutes=1),
            "TIMEOUT": None,
            "KEY_PREFIX": "shop",
            "STRICT": True,
        }
    }

    backend = locks["a"]

    assert isinstance(backend, LocMemBackend)
    assert (backend.alias, backend.ttl, backend.timeout) == ("a", 60.0, None)
    assert (backend.key_prefix, backend.strict) == ("shop", True)


@pytest.mark.parametrize("written", [tenancy.PREFIX, tenancy.prefix])
def test_a_prefix_may_be_a_function_which_is_asked_each_time(
    settings: Settings, written: object
) -> None:
    settings.DISTLOCK = {"a": {"BACKEND": LOCMEM, "KEY_PREFIX": written}}

    backend = locks["a"]

    with tenant("north"):
        assert backend.key_of("x") == "north|x"
    with tenant("south"):
        assert backend.request("x", ttl=5, holder=None).key == "south|x"


@pytest.mark.parametrize("prefix", ["", "v1.2", "shop", "a b.c", "shop.", "shop-eu.1"])
def test_any_other_text_is_the_prefix_itself(settings: Settings, prefix: str) -> None:
    settings.DISTLOCK = {"a": {"BACKEND": LOCMEM, "KEY_PREFIX": prefix}}

    assert locks["a"].prefix() == prefix


def test_a_function_that_returns_no_text_is_told_when_a_lock_is_asked_for(
    settings: Settings,
) -> None:
    settings.DISTLOCK = {"a": {"BACKEND": LOCMEM, "KEY_PREFIX": "tests.fixtures.tenancy.no_text"}}

    with pytest.raises(
        InvalidLockBackend,
        match=r"^DISTLOCK\['a'\]: KEY_PREFIX is the function tests\.fixtures\.tenancy\.no_text\(\), "
        r"which must return a str, not 7\.$",
    ):
        lock("x", using="a").locked()


@pytest.mark.parametrize(
    ("value", "expected"), [(1, 1.0), (0.25, 0.25), (timedelta(milliseconds=1500), 1.5), (1e9, 1e9)]
)
def test_seconds_are_numbers_or_timedeltas(value: object, expected: float) -> None:
    result = seconds(value, "ttl")

    assert (result, type(result)) == (expected, float)


@pytest.mark.parametrize("value", [None, "1", b"1", [1], True, Decimal(1), 1j], ids=repr)
def test_what_is_no_time_is_a_type_error_that_names_it(value: object) -> None:
    with pytest.raises(TypeError, match="ttl must be a number of seconds or a timedelta"):
        seconds(value, "ttl")


@pytest.mark.parametrize(
    "value",
    [0, -1, -0.1, math.nan, math.inf, -math.inf, 1e10, 10**400, timedelta(seconds=-1)],
    ids=lambda value: repr(value)[:20],
)
def test_a_time_that_cannot_be_is_a_value_error_that_names_it(value: object) -> None:
    with pytest.raises(ValueError, match="ttl must be more than 0 seconds"):
        seconds(value, "ttl")


def test_zero_and_none_are_timeouts_but_no_ttls() -> None:
    assert optional_seconds(0, "timeout") == 0
    assert optional_seconds(None, "timeout") is None
    for wrong in (-1, math.nan):
        with pytest.raises(ValueError, match="timeout must be 0 or more"):
            optional_seconds(wrong, "timeout")


@pytest.mark.parametrize(
    "value", [threading.TIMEOUT_MAX * 1.01, math.inf, 10**400, timedelta.max], ids=repr
)
def test_a_timeout_is_as_long_as_one_of_threading_and_no_longer(value: object) -> None:
    assert optional_seconds(threading.TIMEOUT_MAX, "timeout") == threading.TIMEOUT_MAX

    with pytest.raises(OverflowError, match="timeout must be at most"):
        optional_seconds(value, "timeout")


@dataclass(frozen=True)
class Options:
    on: bool = True
    seconds: float = 1.0
    longest: float | None = None
    url: str | None = None
    other: object = None


@pytest.mark.parametrize(
    "values",
    [{}, {"on": False, "seconds": 2, "longest": 0.5, "url": "x", "other": []}],
    ids=["defaults", "all"],
)
def test_options_of_the_right_kinds_are_taken(values: dict[str, Any]) -> None:
    check_values(Options(**values))


def test_an_option_that_is_a_time_may_be_a_timedelta() -> None:
    options = Options(seconds=cast("float", timedelta(minutes=1)), longest=2)

    check_values(options)

    assert (options.seconds, options.longest) == (60.0, 2.0)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"on": 1}, "'on' must be True or False, not 1."),
        ({"seconds": "1"}, "'seconds' must be a number of seconds or a timedelta, not '1'."),
        ({"seconds": None}, "'seconds' must be a number of seconds or a timedelta, not None."),
        ({"longest": "1"}, "'longest' must be a number of seconds or a timedelta, not '1'."),
        ({"longest": 0}, "'longest' must be more than 0 seconds, and at most 1000000000, not 0."),
        ({"url": 1}, "'url' must be a str, not 1."),
    ],
)
def test_an_option_of_the_wrong_kind_is_told_by_its_name(
    values: dict[str, Any], problem: str
) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        check_values(Options(**values))

    assert str(raised.value) == problem


def test_a_ttl_that_is_all_drift_is_refused() -> None:
    with pytest.raises(ValueError, match="ttl must be at least"):
        checked_ttl(0.002)
    assert checked_ttl(0.05) == 0.05


def test_one_to_a_thousand_may_hold_a_lock_at_once() -> None:
    assert [checked_limit(number, "limit") for number in (1, 1000)] == [1, 1000]

    for wrong in (0, 1001):
        with pytest.raises(ValueError, match=f"limit must be from 1 to 1,000, not {wrong}"):
            checked_limit(wrong, "limit")
    with pytest.raises(TypeError, match="limit must be a whole number, not '1'"):
        checked_limit("1", "limit")


def test_it_knows_whether_tests_of_django_run(monkeypatch: pytest.MonkeyPatch) -> None:
    # As it is: for all other tests, it is told that none run.
    found = spec_from_file_location("django_distlock.conf_as_it_is", conf.__file__)
    assert found
    assert found.loader
    as_it_is = module_from_spec(found)
    monkeypatch.setitem(sys.modules, found.name, as_it_is)
    found.loader.exec_module(as_it_is)

    assert as_it_is.tests_run() is True
    with monkeypatch.context() as patch:
        patch.delattr("django.test.utils._TestState.saved_data")
        assert as_it_is.tests_run() is False
    monkeypatch.delitem(sys.modules, "django.test.utils")
    assert as_it_is.tests_run() is False


@pytest.fixture
def tests_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Have locks notice that Django's tests run, as those of users do; call it to begin another test."""

    def begin(test: str) -> None:
        monkeypatch.setenv("PYTEST_CURRENT_TEST", f"{test} (call)")

    with monkeypatch.context() as patch:
        patch.setattr(conf, "tests_run", lambda: True)
        yield begin
    assert isinstance(locks["default"], DatabaseBackend)


def test_locks_of_transactions_are_those_of_the_tenant(
    settings: Settings, tests_run: Callable[[str], None]
) -> None:
    def tries(name: str) -> bool:
        try:
            with tenant(name), transaction.atomic():
                transaction_lock("x", timeout=0)
        except LockNotAcquired:
            return False
        finally:
            connection.close()
        return True

    settings.DISTLOCK = {"default": {"KEY_PREFIX": tenancy.PREFIX}}
    with tenant("north"), transaction.atomic():
        transaction_lock("x", timeout=0)

        assert [elsewhere(partial(tries, each)) for each in ("north", "south")] == [False, True]
    settings.DISTLOCK = {"other": {}}
    with transaction.atomic():
        transaction_lock("x", timeout=0)
    settings.DISTLOCK = {"default": {}}


def test_aliases_are_in_memory_while_tests_run(
    settings: Settings, tests_run: Callable[[str], None]
) -> None:
    settings.DISTLOCK = {
        "default": {"TTL": 7, "KEY_PREFIX": "shop", "OPTIONS": {"using": "default"}},
        "own": {"OPTIONS": {"fair": True}, "TEST": {"BACKEND": None}},
        "own with other options": {
            "OPTIONS": {"fair": True},
            "TEST": {"BACKEND": None, "OPTIONS": {"io_timeout": 3}},
        },
        "other": {"OPTIONS": {"fair": True}, "TEST": {"BACKEND": DUMMY}},
    }

    default = locks["default"]
    assert isinstance(default, LocMemBackend)
    assert (default.ttl, default.key_prefix) == (7.0, "shop")
    assert isinstance(locks["own"], DatabaseBackend)
    assert (locks["own"].options.fair, locks["own"].options.io_timeout) == (True, 1.5)
    own = locks["own with other options"].options
    assert (own.fair, own.io_timeout) == (False, 3)
    assert isinstance(locks["other"], DummyBackend)


def test_alias_used_before_tests_run_is_swapped_and_put_back(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.DISTLOCK = {"default": {}}
    recipe = lock("swapped")
    with recipe as lease:
        monkeypatch.setattr(conf, "tests_run", lambda: True)

        with recipe as inner:
            assert inner is lease
        with lock("another") as other:
            assert isinstance(other.backend, LocMemBackend)
    monkeypatch.undo()

    with recipe as lease:
        assert isinstance(lease.backend, DatabaseBackend)
