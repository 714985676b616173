"""Delete rows that locks have left, in short transactions that skip locked rows."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django_distlock.engine.values import Purged

from .dialect import COUNTER, LOCK, WAITER, listed, microseconds, short_transaction
from .records import for_update, server_now

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from django.db.backends.utils import CursorWrapper

    Ask = Callable[..., Any]
    Parameters = dict[str, Any]

#: The lowest *older_than*, in seconds. A late statement may insert a deleted row again, with a token of its own
#: time, which must be above the deleted token; and SQLite's clock counts milliseconds. Without this
#: limit, 4 of 6,000 tokens were issued twice on SQLite.
LEAST_AGE = 10.0
#: The keys of a batch become parameters of a statement; servers accept some ten thousand.
LARGEST_BATCH = 10_000

# The lock has no holder that could still renew it and no waiter, and the clock is past its token.
_IS_OLD = f"""l.available_at < %(cutoff)s AND l.updated_at < %(cutoff)s
    AND (l.owner IS NULL OR l.expires_at < %(cutoff)s) AND l.fencing_token < %(token)s
    AND NOT EXISTS (SELECT 1 FROM {WAITER} AS w WHERE w.method_name = l.method_name AND w.expires_at >= %(now)s)"""

# The next rows in the order of their ids, each with whether it is old: no row is read twice, and none
# is locked yet.
_LOOK = f"""
SELECT l.id, l.method_name, CASE WHEN {_IS_OLD} THEN 1 ELSE 0 END
FROM {LOCK} AS l WHERE l.id > %(after)s ORDER BY l.id LIMIT %(size)s"""
_LOOK_AT_WAITERS = f"""
SELECT w.ticket, w.method_name, CASE WHEN w.expires_at < %(dead)s THEN 1 ELSE 0 END
FROM {WAITER} AS w WHERE w.ticket > %(after)s ORDER BY w.ticket LIMIT %(size)s"""
_ENDS = f"SELECT min(id), max(id) FROM {LOCK}"

# Decides on the newest version of the rows: rows that were used meanwhile are no longer old.
_SEIZE = f"SELECT l.id, l.method_name FROM {LOCK} AS l WHERE l.id IN {{these}} AND {_IS_OLD} ORDER BY l.id"
_DELETE = f"DELETE FROM {LOCK} WHERE id IN {{these}}"
_SEIZE_COUNTERS = (
    f"SELECT method_name FROM {COUNTER} WHERE method_name IN {{these}} AND value < %(token)s"
)
_DELETE_COUNTERS = f"DELETE FROM {COUNTER} WHERE method_name IN {{these}}"
_DELETE_WAITERS = f"DELETE FROM {WAITER} WHERE ticket IN {{these}} AND expires_at < %(dead)s"


def check_limits(older_than: float, batch_size: int) -> None:
    if not older_than >= LEAST_AGE:
        raise ValueError(f"older_than must be {LEAST_AGE:g} seconds or more, not {older_than!r}.")
    if not 1 <= batch_size <= LARGEST_BATCH:
        raise ValueError(f"batch_size must be from 1 to {LARGEST_BATCH}, not {batch_size!r}.")


def purge(
    ask: Ask, is_mine: Callable[[str], bool], older_than: float, batch_size: int, *, dry_run: bool
) -> Iterator[Purged]:
    """Purge, and yield each batch, of *batch_size* rows in one transaction.

    *ask* runs a verb on a cursor in autocommit; *is_mine* returns True for a key of this alias.
    """
    known = ask(_moment, older_than, batch_size)
    ((first, last),) = ask(_fetched, _ENDS, known)
    first, last = first or 0, last or 0
    for look, *delete in ((_LOOK, _delete), (_LOOK_AT_WAITERS, _execute, _DELETE_WAITERS)):
        after = 0
        while batch := ask(_fetched, look, {**known, "after": after}):
            after = batch[-1][0]
            keys = [key for key, method_name, is_old in batch if is_old and is_mine(method_name)]
            deleted = ask(*delete, keys, known) if keys and not dry_run else len(keys)
            done = (after - first + 1) / (last - first + 1) if look is _LOOK else 1.0
            yield Purged(len(batch), deleted, min(1.0, done))


def _moment(cursor: CursorWrapper, older_than: float, batch_size: int) -> Parameters:
    """Return the parameters of the statements: times of the server, the same for the whole purge."""
    now = server_now(cursor)
    cutoff = now - timedelta(seconds=older_than)
    write = cursor.db.ops.adapt_datetimefield_value
    # *older_than* does not apply to positions in the queue: one that can no longer be renewed is useless.
    dead = now - timedelta(seconds=LEAST_AGE)
    instants = {"now": write(now), "cutoff": write(cutoff), "dead": write(dead)}
    return {**instants, "token": microseconds(cutoff), "size": batch_size}


def _fetched(cursor: CursorWrapper, statement: str, known: Parameters) -> list[tuple[Any, ...]]:
    cursor.execute(statement, known)
    rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows


def _delete(cursor: CursorWrapper, keys: list[int], known: Parameters) -> int:
    with short_transaction(cursor):
        locks = _select(cursor, _SEIZE + for_update(cursor), keys, known)
        deleted = _execute(cursor, _DELETE, [key for key, _ in locks], known)
        # The counters come last, since for an acquire a locked counter means busy. A counter locked by guard() stays.
        names = [name for _, name in locks]
        counters = _select(cursor, _SEIZE_COUNTERS + for_update(cursor), names, known)
        _execute(cursor, _DELETE_COUNTERS, [name for (name,) in counters], known)
    return deleted


def _select(
    cursor: CursorWrapper, statement: str, these: Collection[Any], known: Parameters
) -> list[tuple[Any, ...]]:
    _execute(cursor, statement, these, known)
    return cursor.fetchall() if these else []


def _execute(
    cursor: CursorWrapper, statement: str, these: Collection[Any], known: Parameters
) -> int:
    """Execute *statement* with its list filled in, if that is not empty; return the number of rows."""
    if not these:
        return 0
    marks, values = listed(these)
    cursor.execute(statement.format(these=marks), {**known, **values})
    count: int = cursor.rowcount
    return count
