"""`manage.py check`: reports wrong settings before they are used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.checks import CheckMessage, Error, Tags, register

from .exceptions import InvalidLockBackend
from .handler import locks

if TYPE_CHECKING:
    from collections.abc import Sequence


@register("distlock")
def check_settings(app_configs: Any = None, **kwargs: Any) -> list[CheckMessage]:
    """Report each alias of DISTLOCK whose settings are wrong, and what its backend reports."""
    return _check(None)


@register("distlock", Tags.database)
def check_servers(
    app_configs: Any = None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """Run the checks that ask servers; only with ``manage.py check --database``."""
    return _check(list(databases)) if databases else []


def _check(databases: Sequence[str] | None) -> list[CheckMessage]:
    try:
        aliases = list(locks)
    except InvalidLockBackend as error:
        return [] if databases else [_error(error)]
    found: list[CheckMessage] = []
    for alias in aliases:
        try:
            found += locks[alias].check(databases)
        except InvalidLockBackend as error:
            if not databases:  # else check_settings() reports it
                found.append(_error(error))
    return found


def _error(error: InvalidLockBackend) -> Error:
    hint = "See the reference of django_distlock, System checks, distlock.E001."
    return Error(str(error), hint=hint, id="distlock.E001")
