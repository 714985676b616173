"""The DISTLOCK setting: its defaults and the checks of its values."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.utils.module_loading import import_string

from .addresses import from_url
from .exceptions import InvalidLockBackend
from .ground.naming import MOST_PLACES

DEFAULT_ALIAS = "default"
DEFAULT_BACKEND = "django_distlock.backends.database.DatabaseBackend"
DEFAULT_TTL = 30.0
DEFAULT_TIMEOUT = 10.0
KEYS = ("BACKEND", "TTL", "TIMEOUT", "KEY_PREFIX", "STRICT", "OPTIONS", "TEST")
#: The backend for all aliases while Django's tests run, and the keys of TEST, which can choose another backend.
TEST_BACKEND = "django_distlock.backends.locmem.LocMemBackend"
TEST_KEYS = ("BACKEND", "OPTIONS")
#: The options with the address of a server, and names that people write instead.
_ADDRESSES = {"location", "servers", "endpoints", "hosts", "using", "cache"}
_GUESSES = _ADDRESSES | {"url", "urls", "host", "server", "address", "database", "db", "alias"}
#: Seconds, about 31 years: servers add a time to the current date, and the sum must fit.
LONGEST = 1e9
LEAST_TTL = 0.01
#: A KEY_PREFIX with dots between Python names is the dotted path of a function; any other text is the prefix itself.
_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


@dataclass(frozen=True, slots=True)
class NoOptions:
    """OPTIONS of a backend without options."""


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """The checked settings of one alias. *ttl* and *timeout* are seconds; timeout None: no limit.

    *key_prefix* is the prefix, or a function that returns it.
    """

    alias: str
    backend: str = DEFAULT_BACKEND
    ttl: float = DEFAULT_TTL
    timeout: float | None = DEFAULT_TIMEOUT
    key_prefix: str | Callable[[], str] = ""
    strict: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    test: dict[str, Any] = field(default_factory=dict)

    def in_tests(self) -> BackendSettings:
        """Return the settings to use while Django's tests run."""
        backend = self.test.get("BACKEND", TEST_BACKEND)
        options = self.test.get("OPTIONS", self.options if backend is None else {})
        return replace(self, backend=backend or self.backend, options=options)


def tests_run() -> bool:
    """Return True while Django's tests run: between setup_test_environment() and teardown_test_environment()."""
    utils = sys.modules.get("django.test.utils")
    return hasattr(getattr(utils, "_TestState", None), "saved_data")


def read_settings() -> dict[str, Any]:
    """Return the unchecked settings by alias, for read_alias(); InvalidLockBackend if DISTLOCK is not a dict."""
    written = getattr(settings, "DISTLOCK", {DEFAULT_ALIAS: {}})
    if not isinstance(written, dict):
        msg = f"DISTLOCK must be a dict of aliases, like {{'default': 'redis://cache:6379'}}, not {type(written).__name__}."
        raise InvalidLockBackend(msg)
    for alias in written:
        if not isinstance(alias, str) or not alias:
            msg = f"DISTLOCK[{alias!r}]: an alias must be a str that is not empty."
            raise InvalidLockBackend(msg)
    return dict(written)


def seconds(value: object, what: str, *, zero: bool = False, longest: float = LONGEST) -> float:
    """Return *value*, a number of seconds or a timedelta, as seconds; otherwise raise TypeError or ValueError.

    The value must be more than 0, or 0 or more with *zero*, and at most *longest*.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{what} must be a number of seconds or a timedelta, not {value!r}.")
    # NaN fails this too.
    if not 0 <= value <= longest or (value == 0 and not zero):
        least = "0 or more" if zero else "more than 0"
        msg = f"{what} must be {least} seconds, and at most {longest:.0f}, not {value!r}."
        raise ValueError(msg)
    return float(value)


def flag(value: object, what: str) -> bool:
    """Return *value*; TypeError if it is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be True or False, not {value!r}.")
    return value


def checked_ttl(value: object, what: str = "ttl") -> float:
    """Return *value*, a ttl, as seconds() does; ValueError below LEAST_TTL, as the drift of clocks is subtracted from it."""
    ttl = seconds(value, what)
    if ttl < LEAST_TTL:
        raise ValueError(f"{what} must be at least {LEAST_TTL} seconds, not {ttl!r}.")
    return ttl


def checked_limit(value: object, what: str) -> int:
    """Return *value* if it is a valid limit; otherwise raise ValueError or TypeError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be a whole number, not {value!r}.")
    if not 1 <= value <= MOST_PLACES:
        raise ValueError(f"{what} must be from 1 to {MOST_PLACES:,}, not {value!r}.")
    return value


def optional_seconds(value: object, what: str) -> float | None:
    """Return *value*, a timeout, as seconds() does; 0 is allowed, and None means no limit.

    OverflowError above ``threading.TIMEOUT_MAX``, as for the locks of ``threading``.
    """
    if value is None:
        return None
    wanted = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(wanted, (int, float)) and wanted > threading.TIMEOUT_MAX:
        msg = f"{what} must be at most {threading.TIMEOUT_MAX:.0f} seconds, not {value!r}."
        raise OverflowError(msg)
    return seconds(value, what, zero=True, longest=threading.TIMEOUT_MAX)


def checked_options(backend: type[Any], found: BackendSettings) -> BackendSettings:
    """Return *found* if *backend* knows all of its OPTIONS; otherwise raise InvalidLockBackend."""
    known = sorted(option.name for option in fields(backend.options_class))
    for option in found.options:
        if option not in known:
            hint = f" It takes {', '.join(known)}" if known else " It takes none"
            if (lower := str(option).lower()) in known:
                hint += f": write {lower!r}"
            elif lower.upper() in KEYS:
                hint += f": write {lower.upper()} beside OPTIONS"
            elif lower in _GUESSES and (meant := _ADDRESSES.intersection(known)):
                hint += f": write {meant.pop()!r}"
            raise InvalidLockBackend(
                f"DISTLOCK[{found.alias!r}]: unknown OPTIONS {option!r}.{hint}."
            )
    return found


def must(fact: object, msg: str) -> None:
    """Raise ValueError with *msg* unless *fact*."""
    if not fact:
        raise ValueError(msg)


def check_values(options: Any) -> None:
    """Check the bool, float and ``str | None`` fields of *options*, and make times seconds; TypeError or ValueError for a wrong value."""
    for option in fields(options):
        value, kind = getattr(options, option.name), str(option.type)
        if kind == "bool":
            flag(value, f"{option.name!r}")
        if kind == "float" or (kind == "float | None" and value is not None):
            object.__setattr__(options, option.name, seconds(value, f"{option.name!r}"))
        if kind == "str | None" and value is not None:
            _of_type(repr(option.name), value, str, shown=option.repr)


def read_alias(alias: str, values: object) -> BackendSettings:
    """Return the settings of *alias*; InvalidLockBackend names the alias and the key."""
    where = f"DISTLOCK[{alias!r}]"
    values = as_dict(alias, values)
    for key in values:
        if key not in KEYS:
            hint = f" It takes {', '.join(KEYS)}"
            if (upper := str(key).upper()) in KEYS:
                hint += f": write {upper}"
            elif upper.lower() in _GUESSES:
                hint += ": the address of the server is one of its OPTIONS"
            raise InvalidLockBackend(f"{where}: unknown key {key!r}.{hint}.")
    try:
        return BackendSettings(
            alias=alias,
            backend=_of_type(f"{where}: BACKEND", values.get("BACKEND", DEFAULT_BACKEND), str),
            ttl=checked_ttl(values.get("TTL", DEFAULT_TTL), f"{where}: TTL"),
            timeout=optional_seconds(values.get("TIMEOUT", DEFAULT_TIMEOUT), f"{where}: TIMEOUT"),
            key_prefix=_key_prefix(f"{where}: KEY_PREFIX", values.get("KEY_PREFIX", "")),
            strict=_of_type(f"{where}: STRICT", values.get("STRICT", False), bool),
            options=_of_type(f"{where}: OPTIONS", values.get("OPTIONS", {}), dict),
            test=_test(f"{where}: TEST", values.get("TEST", {})),
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidLockBackend(str(error)) from error


def as_dict(alias: str, values: object) -> dict[str, Any]:
    """Return the settings of *alias*, a dict or a URL, as a dict; InvalidLockBackend if *values* are neither."""
    where = f"DISTLOCK[{alias!r}]"
    try:
        values = from_url(values) if isinstance(values, str) else values
    except ValueError as error:
        # "from None" because the original error may show the password.
        raise InvalidLockBackend(f"{where} {error}") from None
    if not isinstance(values, dict):
        raise InvalidLockBackend(f"{where} must be a dict or a URL, not {type(values).__name__}.")
    return values


def _test(where: str, values: object) -> dict[str, Any]:
    test: dict[str, Any] = _of_type(where, values, dict)
    for key in test:
        if key not in TEST_KEYS:
            raise ValueError(f"{where}: unknown key {key!r}. It takes {', '.join(TEST_KEYS)}.")
    if test.get("BACKEND") is not None:
        _of_type(f"{where}: BACKEND", test["BACKEND"], str)
    _of_type(f"{where}: OPTIONS", test.get("OPTIONS", {}), dict)
    return test


def _key_prefix(where: str, value: object) -> str | Callable[[], str]:
    """Return *value*, or the function of which it is the dotted path."""
    if callable(value):
        return value
    prefix: str = _of_type(where, value, str)
    if not _PATH.fullmatch(prefix):
        return prefix
    advice = "If it is the prefix itself, write it without dots."
    try:
        found = import_string(prefix)
    except ImportError as error:
        msg = f"{where} {prefix!r} is a dotted path that cannot be imported: {error}. {advice}"
        raise ValueError(msg) from error
    if not callable(found):
        raise TypeError(f"{where} {prefix!r} is the dotted path of no function. {advice}")
    return found  # type: ignore[no-any-return]


def shown_alias(name: object) -> str:
    """Return *name*, which is no alias, for an error: a URL may have a password."""
    return "a URL" if "://" in str(name) else repr(name)


def _of_type(what: str, value: object, kind: type[Any], *, shown: bool = True) -> Any:
    """Return *value* if it is a *kind*; otherwise raise TypeError, which shows a secret by its class only."""
    if isinstance(value, kind):
        return value
    # In the place of a dict, people write URLs with passwords.
    given = repr(value) if shown and kind is not dict else type(value).__name__
    raise TypeError(f"{what} must be a {kind.__name__}, not {given}.")
