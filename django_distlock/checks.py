"""`manage.py check`: wrong settings before they bite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.checks import CheckMessage, Error, Tags, register

from .exceptions import InvalidLockBackend
from .handler import locks

if TYPE_CHECKING:
    from collections.abc import Sequence

DOCS = "See the reference of django_distlock, checks"


@register("distlock")
def check_settings(app_configs: Any = None, **kwargs: Any) -> list[CheckMessage]:
    """Report each alias of DISTLOCK that cannot be made a backend, and what backends say of theirs."""
    return _check(None)


@register("distlock", Tags.database)
def check_servers(
    app_configs: Any = None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """Ask the servers too: only with ``manage.py check --database``."""
    return _check(list(databases)) if databases else []


def _check(databases: Sequence[str] | None) -> list[CheckMessage]:
    try:
        aliases = list(locks)
    except InvalidLockBackend as error:
        return [] if databases else [_error(error)]
    return [message for alias in aliases for message in _check_alias(alias, databases)]


def _check_alias(alias: str, databases: Sequence[str] | None) -> list[CheckMessage]:
    try:
        backend = locks[alias]
    except InvalidLockBackend as error:
        return [] if databases else [_error(error)]
    return backend.check(databases)


def _error(error: InvalidLockBackend) -> Error:
    return Error(str(error), hint=f"{DOCS}, distlock.E001.", id="distlock.E001")
