"""Mistakes that are planted in the running code, each of which some schedule must show."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from django.db import models

from django_distlock.backends import rowlock
from django_distlock.backends.database import dialect, mysql, postgresql, purge, sqlite
from django_distlock.backends.database.dialect import LOCK, Dialect, parameters
from django_distlock.engine import fencing
from django_distlock.engine.values import Busy, Grant
from django_distlock.ground.objects import CLAIM

from .plans import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from django_distlock.engine.values import Release, Request

#: Where texts stand of which statements are made.
_PLACES: tuple[Any, ...] = (
    *(dialect, mysql, postgresql, purge, sqlite),
    *(Dialect, mysql.MySQL, postgresql.PostgreSQL, sqlite.SQLite),
)
ALL = ("postgres", "mariadb", "sqlite")


#: The end of the statement of a release.
_RELEASED = "ELSE available_at END\nWHERE method_name = %(key)s"


@dataclass(frozen=True)
class Fault:
    """One mistake, and the small plan some order of which shows it.

    *edits*: texts of statements, those that a server has, and what replaces them; *functions*: the same of functions.
    """

    name: str
    scripts: tuple[str, ...]
    servers: tuple[str, ...]
    edits: tuple[tuple[str, str], ...] = ()
    functions: tuple[tuple[Any, str, Callable[..., Any]], ...] = ()
    level: str = "READ_COMMITTED"
    is_old: bool = True

    @property
    def plan(self) -> Plan:
        return Plan(self.scripts, self.level, is_old=self.is_old)

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Make the mistake in all backends that are made meanwhile."""
        with ExitStack() as stack:
            for old, new in self.edits:
                found = [
                    (place, name, text)
                    for place in _PLACES
                    for name, text in vars(place).items()
                    if isinstance(text, str) and old in text
                ]
                assert found, f"no statement has {old!r}"
                for place, name, text in found:
                    stack.enter_context(patch.object(place, name, text.replace(old, new)))
            for place, name, function in self.functions:
                stack.enter_context(patch.object(place, name, function))
            yield


def _upsert(self: Any, cursor: Any, request: Request) -> Grant | Busy:
    """Believe the row count of an upsert, which by Django's FOUND_ROWS counts a row that was left as it was."""
    known, after = parameters(request), mysql._AFTER.format("%(ttl)s")
    is_free = "available_at <= SYSDATE(6)"
    cursor.execute(
        f"""INSERT INTO {LOCK} (method_name, description, owner, fencing_token, acquired_at, expires_at, available_at, updated_at)
        VALUES (%(key)s, %(name)s, %(owner)s, {mysql.MICROSECONDS}, SYSDATE(6), {after}, {after}, SYSDATE(6))
        ON DUPLICATE KEY UPDATE owner = IF({is_free}, VALUES(owner), owner),
            fencing_token = IF({is_free}, VALUES(fencing_token), fencing_token),
            acquired_at = IF({is_free}, VALUES(acquired_at), acquired_at),
            expires_at = IF({is_free}, VALUES(expires_at), expires_at),
            available_at = IF({is_free}, VALUES(available_at), available_at)""",
        known,
    )
    if not cursor.rowcount:
        return Busy()
    cursor.execute(f"SELECT fencing_token FROM {LOCK} WHERE method_name = %(key)s", known)
    return Grant(cursor.fetchone()[0])


def _extend_later(real: Callable[..., list[bool]]) -> Callable[..., list[bool]]:
    def extend(self: Any, cursor: Any, requests: Any) -> list[bool]:
        """Renew leases, but not those that are granted again."""
        is_renewal = sys._getframe(1).f_code.co_name != "_look"
        return real(self, cursor, requests) if is_renewal else [True]

    return extend


def _notify_first(self: Any, cursor: Any, request: Request) -> Release:
    """Notify in a statement, and so a transaction, before that of the release."""
    cursor.execute(postgresql.RING_NEXT, {"line": request.line})
    text = self.release_sql.replace(postgresql.RING_NEXT, "SELECT 1")
    with patch.object(self, "release_sql", text):
        return Dialect.release(self, cursor, request)


def _plain_guard(self: Any, cursor: Any, schema: str, key: str, token: int) -> int | None:
    """Read the token and lock nothing."""
    table = LOCK if cursor.db.vendor == "sqlite" else f"{schema}{dialect.COUNTER}"
    column = "fencing_token" if cursor.db.vendor == "sqlite" else "value"
    cursor.execute(f"SELECT {column} FROM {table} WHERE method_name = %(key)s", {"key": key})
    row = cursor.fetchone()
    return None if row is None else row[0]


def _pass_all(claim: Any, rows: Any, keys: Any, *, claims: bool = False) -> int:
    """Write the fence without comparing it."""
    owned: models.QuerySet[Any] = models.QuerySet(fencing._owner(rows.model), using=rows.db)
    return owned.filter(pk__in=keys).update(fence=claim.token)


def _compare_writes(real: Callable[..., int]) -> Callable[..., int]:
    def pass_fences(claim: Any, rows: Any, keys: Any, *, claims: bool = False) -> int:
        """Fence the write, but not the read before it."""
        return len(keys) if claims else real(claim, rows, keys, claims=True)

    return pass_fences


def _mark(self: Any, row: Any) -> Any:
    """Mark a row as claimed whose fence was not raised."""
    row.__dict__[CLAIM] = self
    return row


def _unlocked(self: Any, how: str) -> str:
    return f"SELECT 1 FROM {self.backend.schema}{LOCK} WHERE method_name = %(key)s"


_LAST_OWNER = (" last_owner = %(owner)s,", "")
_GUARDS = (postgresql.PostgreSQL, mysql.MySQL, sqlite.SQLite)
_TWO = ("acquire release", "acquire release")
_EXPIRED = ("acquire release", "expire", "acquire release")
_RIVALS = ("acquire claim save release", "expire", "acquire claim save release")

FAULTS = (
    Fault(
        "an upsert that decides by what it saw before its wait",
        _TWO,
        ("postgres",),
        (
            (
                "WHERE l.owner = %(owner)s OR l.available_at <= clock_timestamp()\n    RETURNING",
                "RETURNING",
            ),
        ),
        is_old=False,
    ),
    Fault(
        "an upsert that believes its row count",
        _TWO,
        ("mariadb",),
        functions=((mysql.MySQL, "take", _upsert),),
    ),
    Fault(
        "the time at which the transaction began",
        _EXPIRED,
        ("postgres",),
        (("clock_timestamp()", "now()"),),
    ),
    Fault("the time at which the statement began", _TWO, ("mariadb",), (("SYSDATE(6)", "NOW(6)"),)),
    Fault(
        "a notification before the commit",
        ("acquire release", "wait release"),
        ("postgres",),
        functions=((postgresql.PostgreSQL, "release", _notify_first),),
    ),
    Fault(
        "a release that notifies nobody",
        ("acquire release", "wait release"),
        ("postgres",),
        (("AND channel <> ''", "AND false"),),
    ),
    Fault(
        "a release that does not compare the owner",
        _EXPIRED,
        ALL,
        ((f"{_RELEASED} AND owner = %(owner)s", f"{_RELEASED} AND %(owner)s = %(owner)s"),),
    ),
    Fault(
        "a purge that does not look again whether a row is old",
        ("acquire release", "purge"),
        ALL,
        ((f"WHERE l.id IN {{these}} AND {purge._IS_OLD} ORDER", "WHERE l.id IN {these} ORDER"),),
    ),
    Fault(
        "a renewal after the loss",
        ("acquire renew release", "expire"),
        ALL,
        (
            ("owner = %(owner)s AND expires_at > {now}\n", "owner = %(owner)s\n"),
            ("AND l.owner = e.owner AND l.expires_at > clock_timestamp()", "AND l.owner = e.owner"),
        ),
    ),
    Fault(
        "a lost reply that locks its own caller out",
        ("acquire~ release",),
        ("postgres",),
        (("WHERE mine OR (free AND", "WHERE (free AND"),),
    ),
    Fault(
        "a grant that is asked for again, but not renewed",
        ("acquire~ release",),
        ("mariadb",),
        functions=((mysql.MySQL, "extend", _extend_later(mysql.MySQL.extend)),),
    ),
    Fault(
        "a repeated release that is told as a loss",
        ("acquire release~",),
        ALL,
        (_LAST_OWNER,),
    ),
    Fault(
        "a token that is issued twice",
        _TWO,
        ALL,
        (
            (
                f"greatest(l.fencing_token + 1, coalesce((SELECT value FROM counter), 0) + 1, {postgresql.MICROSECONDS})",
                "l.fencing_token",
            ),
            (f"GREATEST(c.value + 1, {mysql.MICROSECONDS})", "c.value"),
            (f"GREATEST(l.fencing_token + 1, {mysql.MICROSECONDS})", "l.fencing_token"),
            ("max(fencing_token + 1, excluded.fencing_token)", "fencing_token"),
        ),
    ),
    Fault(
        "guard() that locks nothing",
        ("acquire guard release", "expire", "acquire release"),
        ALL,
        functions=tuple((kind, "guard", _plain_guard) for kind in _GUARDS),
    ),
    Fault(
        "a claim that does not compare the fence",
        _RIVALS,
        ALL,
        functions=((fencing, "_pass_fences", _pass_all),),
    ),
    Fault(
        "a write that is fenced without a claim before the read",
        _RIVALS,
        ALL,
        functions=(
            (fencing, "_pass_fences", _compare_writes(fencing._pass_fences)),
            (fencing.Claim, "mark", _mark),
        ),
    ),
    Fault(
        "transaction_lock() that locks nothing",
        ("fee", "fee"),
        ("postgres", "mariadb"),
        functions=((rowlock.Taker, "select", _unlocked),),
    ),
    Fault(
        "transaction_lock() after a read at REPEATABLE READ",
        ("fee", "latefee"),
        ("mariadb",),
        functions=((rowlock.Taker, "refuse_isolation", bool),),
        level="REPEATABLE_READ",
    ),
)
