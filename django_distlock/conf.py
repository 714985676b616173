"""The DISTLOCK setting: its defaults, and what is wrong with it in words."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

from django.conf import settings

from .exceptions import InvalidLockBackend

DEFAULT_ALIAS = "default"
DEFAULT_BACKEND = "django_distlock.backends.database.DatabaseBackend"
DEFAULT_TTL = 30.0
DEFAULT_TIMEOUT = 10.0
KEYS = ("BACKEND", "TTL", "TIMEOUT", "KEY_PREFIX", "STRICT", "OPTIONS")
#: Seconds; about 31 years. Servers keep instants, and an instant must fit.
LONGEST = 1e9
LEAST_TTL = 0.01


@dataclass(frozen=True, slots=True)
class NoOptions:
    """The OPTIONS of a backend that has none."""


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """The settings of one alias, checked. *ttl* and *timeout* are seconds; a timeout of None: for ever."""

    alias: str
    backend: str = DEFAULT_BACKEND
    ttl: float = DEFAULT_TTL
    timeout: float | None = DEFAULT_TIMEOUT
    key_prefix: str = ""
    strict: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def read_settings() -> dict[str, BackendSettings]:
    """Return the settings of every alias; InvalidLockBackend names the alias and the key."""
    written = getattr(settings, "DISTLOCK", {DEFAULT_ALIAS: {}})
    if not isinstance(written, dict):
        msg = f"DISTLOCK must be a dict of aliases, not {type(written).__name__}."
        raise InvalidLockBackend(msg)
    return {alias: _read_alias(alias, values) for alias, values in written.items()}


def seconds(value: object, what: str, *, zero: bool = False, longest: float = LONGEST) -> float:
    """Return a time given as a number of seconds or a timedelta; TypeError or ValueError if it is none.

    It must be above 0, or not below 0 with *zero*, and not above *longest*.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        msg = f"{what} must be a number of seconds or a timedelta, not {value!r}."
        raise TypeError(msg)
    # Not a number compares as neither.
    if not 0 <= value <= longest or (value == 0 and not zero):
        least = "0 or more" if zero else "more than 0"
        msg = f"{what} must be {least} seconds, and no more than {longest:.0f}, not {value!r}."
        raise ValueError(msg)
    return float(value)


def checked_ttl(value: object, what: str = "ttl") -> float:
    """See seconds(); a ttl must leave something of itself when the drift of clocks is taken off."""
    ttl = seconds(value, what)
    if ttl < LEAST_TTL:
        msg = f"{what} must be at least {LEAST_TTL} seconds, not {ttl!r}."
        raise ValueError(msg)
    return ttl


def optional_seconds(value: object, what: str) -> float | None:
    """See seconds(); 0 is allowed, and None stands for no limit.

    As long as a lock of ``threading`` can be waited for; OverflowError, as there, for more.
    """
    if value is None:
        return None
    wanted = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(wanted, (int, float)) and wanted > threading.TIMEOUT_MAX:
        msg = f"{what} must be no more than {threading.TIMEOUT_MAX:.0f} seconds, not {value!r}."
        raise OverflowError(msg)
    return seconds(value, what, zero=True, longest=threading.TIMEOUT_MAX)


def checked_options(backend: type[Any], found: BackendSettings) -> BackendSettings:
    """Return *found* if *backend* knows each of its OPTIONS; InvalidLockBackend else."""
    known = sorted(option.name for option in fields(backend.options_class))
    for option in found.options:
        if option not in known:
            hint = f" It takes {', '.join(known)}." if known else " It takes none."
            raise InvalidLockBackend(
                f"DISTLOCK[{found.alias!r}]: unknown OPTIONS {option!r}.{hint}"
            )
    return found


def _read_alias(alias: object, values: object) -> BackendSettings:
    where = f"DISTLOCK[{alias!r}]"
    if not isinstance(alias, str) or not alias:
        raise InvalidLockBackend(f"{where}: an alias must be text.")
    if not isinstance(values, dict):
        raise InvalidLockBackend(f"{where} must be a dict, not {type(values).__name__}.")
    for key in values:
        if key not in KEYS:
            raise InvalidLockBackend(f"{where}: unknown key {key!r}. It takes {', '.join(KEYS)}.")
    try:
        return BackendSettings(alias=alias, **_checked(where, values))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidLockBackend(str(error)) from error


def _checked(where: str, values: dict[str, Any]) -> dict[str, Any]:
    return {
        "backend": _text(f"{where}: BACKEND", values.get("BACKEND", DEFAULT_BACKEND)),
        "ttl": checked_ttl(values.get("TTL", DEFAULT_TTL), f"{where}: TTL"),
        "timeout": optional_seconds(values.get("TIMEOUT", DEFAULT_TIMEOUT), f"{where}: TIMEOUT"),
        "key_prefix": _text(f"{where}: KEY_PREFIX", values.get("KEY_PREFIX", "")),
        "strict": _of_type(f"{where}: STRICT", values.get("STRICT", False), bool),
        "options": _of_type(f"{where}: OPTIONS", values.get("OPTIONS", {}), dict),
    }


def _text(what: str, value: object) -> str:
    text: str = _of_type(what, value, str)
    return text


def _of_type(what: str, value: object, kind: type[Any]) -> Any:
    if isinstance(value, kind):
        return value
    msg = f"{what} must be a {kind.__name__}, not {value!r}."
    raise TypeError(msg)
