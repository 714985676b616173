"""`manage.py check`: reports wrong settings and servers that cannot be used, before locks are needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, Warning as CheckWarning, register

from .conf import DEFAULT_ALIAS
from .exceptions import DOCS, InvalidLockBackend, NotSupported
from .handler import declared, locks

if TYPE_CHECKING:
    from .backends.base import BaseLockBackend

#: The ids of check_settings(), which check_servers() does not repeat.
_OF_SETTINGS = {"distlock.E001", "distlock.E003", "distlock.W001"}


@register("distlock")
def check_settings(app_configs: Any = None, **kwargs: Any) -> list[CheckMessage]:
    """Report each alias of DISTLOCK whose settings are wrong, and what its backend reports."""
    return told([*_found(None), *_check_declared()])


@register("distlock", Tags.database)
def check_servers(
    app_configs: Any = None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """Run the checks that ask servers; only with ``manage.py check --database``."""
    if not databases or _are_of_migrate():
        return []
    found = _found(list(databases))
    return told(message for message in found if message.id not in _OF_SETTINGS)


def _are_of_migrate() -> bool:
    """Return True if ``migrate``, or a subclass, runs the checks: it creates the tables that the checks look for."""
    # A check does not get the command, and execute_from_command_line() may have got other arguments than sys.argv.
    callers = (frame.f_locals.get("self") for frame, _ in walk_stack(None))
    kinds = (kind for caller in callers for kind in type(caller).__mro__)
    # The module of a proxy of wrapt is a property.
    return any(str(kind.__module__).endswith(".commands.migrate") for kind in kinds)


def _found(databases: Sequence[str] | None) -> Iterator[CheckMessage]:
    try:
        aliases = list(locks)
    except InvalidLockBackend as error:
        yield _wrong(error)
        return
    if DEFAULT_ALIAS not in aliases:
        text = f"DISTLOCK has no alias {DEFAULT_ALIAS!r}: lock() without using= fails."
        hint = f"Add DISTLOCK[{DEFAULT_ALIAS!r}], or give using= everywhere."
        yield CheckWarning(text, hint=hint, id="distlock.W001")
    for alias in aliases:
        try:
            yield from _check_alias(locks[alias], databases)
            if databases is not None:
                locks[alias].check_key()
            if databases is None and apps.is_installed("django_tenants"):
                yield from _check_tenants(locks[alias])
        except InvalidLockBackend as error:
            yield _wrong(error)


def _check_alias(backend: BaseLockBackend, databases: Sequence[str] | None) -> list[CheckMessage]:
    try:
        return backend.check(databases)
    except Exception:
        backend.check_key()  # which says so if that failed
        raise


def _check_declared() -> Iterator[CheckMessage]:
    """Report decorated functions and tasks whose alias lacks a feature that they need."""
    # Importing the URLs imports the views, too. Django's own checks report errors in them.
    with suppress(Exception):
        import_module(settings.ROOT_URLCONF)
    for each in sorted(declared, key=lambda each: each.title):
        yield from getattr(each, "check", tuple)()
        # check_settings() reports wrong settings of an alias.
        with suppress(InvalidLockBackend):
            if each.using not in [*locks, DEFAULT_ALIAS]:
                problem: object = f"DISTLOCK has no alias {each.using!r}"
            else:
                try:
                    each.check_against(locks[each.using])
                    continue
                except NotSupported as error:
                    problem = error
            text = f"{each.title}(): {str(problem).rstrip('.')}."
            hint = "Give it another alias, or leave out what this one cannot do."
            yield Error(text, hint=hint, id="distlock.E010")


def _check_tenants(backend: BaseLockBackend) -> Iterator[CheckMessage]:
    """Warn if two tenants get the same key for a name."""
    from django_tenants.utils import schema_context

    keys = set[str]()
    try:
        for schema in ("one", "another"):
            with schema_context(schema):
                keys.add(backend.key_of("x"))
    except Exception:  # noqa: BLE001 - the project's function asks more of a tenant than its schema
        return
    if len(keys) == 1:
        text = f"DISTLOCK[{backend.alias!r}]: all tenants share its locks: one waits for the lock of the same name of another."
        hint = (
            "Set KEY_PREFIX to the dotted path of a function that returns the schema of the tenant."
        )
        yield CheckWarning(text, hint=hint, id="distlock.W005")


def _wrong(error: InvalidLockBackend) -> Error:
    return Error(str(error), hint=error.hint, id=error.check)


def told(messages: Iterable[CheckMessage]) -> list[CheckMessage]:
    """Add to each message the URL of its documentation, and merge equal messages of several aliases into one."""
    told: dict[Any, CheckMessage] = {}
    for message in messages:
        alias, _, text = message.msg.partition(": ")
        first = told.setdefault((message.id, text or alias, message.hint), message)
        if first is not message:
            first.msg = f"{first.msg.partition(': ')[0]}, {alias}: {text}"
    for message in told.values():
        if message.id and message.id.startswith("distlock."):
            page = f"{DOCS}reference/checks.html#{message.id.lower().replace('.', '-')}"
            message.hint = f"{message.hint} See {page}"
    return list(told.values())
