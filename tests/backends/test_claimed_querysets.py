"""Claimed querysets: each instance that they give compares its fence, however it is read."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
from asgiref.sync import async_to_sync
from django.db import models
from django.db.models.query import BaseIterable, ModelIterable

from django_distlock import StaleFencingToken, lock
from testproject.models import Account, Fee

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from django_distlock import Lease

    Holders = tuple[Lease, Lease]


class Stamping(ModelIterable):  # type: ignore[type-arg]  # generic in the stubs alone
    """An iterable of a project's own: each instance gets something that pages need."""

    def __iter__(self) -> Iterator[Any]:
        for row in super().__iter__():
            row.stamp = "seen"
            yield row


class AskingAgain(ModelIterable):  # type: ignore[type-arg]  # as above
    """As in django-polymorphic: the instances come from a second query."""

    def __iter__(self) -> Iterator[Any]:
        keys = [row.pk for row in super().__iter__()]
        yield from models.QuerySet(self.queryset.model, using=self.queryset.db).filter(pk__in=keys)


class Names(BaseIterable):  # type: ignore[type-arg]  # as above
    """What gives no instances, and is not from Django."""

    def __iter__(self) -> Iterator[Any]:
        rows: Any = ModelIterable(self.queryset)
        for row in rows:
            yield row.name


class Rows(models.QuerySet[Account]):
    """The queryset of a project's own."""

    def read_by(self, iterable: type[Any]) -> Any:
        rows = self._chain()  # type: ignore[attr-defined]  # not in the stubs
        rows._iterable_class = iterable
        return rows

    def distlock(self) -> str:
        return "ours"


async def _all(rows: Any) -> list[Any]:
    return [row async for row in rows.aiterator()]


WAYS: dict[str, Callable[[Lease, Rows], Any]] = {
    "list": lambda lease, rows: [*lease.claim(rows)],
    "own iterable": lambda lease, rows: [*lease.claim(rows.read_by(Stamping))],
    "own iterable after the claim": lambda lease, rows: [*lease.claim(rows).read_by(Stamping)],
    "second query": lambda lease, rows: [*lease.claim(rows.read_by(AskingAgain))],
    "Django's own after the claim": lambda lease, rows: [
        *lease.claim(rows.read_by(Stamping)).read_by(ModelIterable)
    ],
    "iterator": lambda lease, rows: [*lease.claim(rows.read_by(Stamping)).iterator()],
    "get": lambda lease, rows: [lease.claim(rows).get()],
    "first": lambda lease, rows: [lease.claim(rows).first()],
    "in_bulk": lambda lease, rows: [*lease.claim(rows).in_bulk().values()],
    "chained": lambda lease, rows: [*lease.claim(rows).filter(balance__gt=0).order_by("name")],
    "locked": lambda lease, rows: [*lease.claim(rows.select_for_update())],
    "claimed twice": lambda lease, rows: [*lease.claim(lease.claim(rows))],
    "prefetched": lambda lease, rows: [*lease.claim(rows.prefetch_related("fees"))],
    "all & claimed": lambda lease, rows: [*(rows.model.objects.using(rows.db) & lease.claim(rows))],
    "claimed & all": lambda lease, rows: [*(lease.claim(rows) & rows.all())],
    "rows | claimed": lambda lease, rows: [*(rows.filter(pk=0) | lease.claim(rows))],
    "rows ^ claimed": lambda lease, rows: [*(rows.filter(pk=0) ^ lease.claim(rows))],
    "pickled": lambda lease, rows: [*pickle.loads(pickle.dumps(lease.claim(rows)))],
    "pickled and chained": lambda lease, rows: [
        *pickle.loads(pickle.dumps(lease.claim(rows))).filter(balance__gt=0)
    ],
}


@pytest.mark.parametrize("way", WAYS)
def test_the_row_of_a_late_holder_is_refused(
    database: str, account: Account, holders: Holders, way: str
) -> None:
    rows = Rows(Account, using=database).filter(pk=account.pk)
    first, second = holders

    [late] = WAYS[way](first, rows)
    [fresh] = WAYS[way](second, rows)

    for write in (late.save, late.delete):
        with pytest.raises(StaleFencingToken, match="a later holder"):
            write()
    fresh.balance = 60
    fresh.save()
    account.refresh_from_db()
    assert [account.balance, account.fence] == [60, second.fencing_token]


@pytest.mark.parametrize("database", ["default"])
def test_so_is_one_that_a_task_has_read(database: str, account: Account, holders: Holders) -> None:
    rows = Rows(Account, using=database).filter(pk=account.pk)
    first, second = holders

    [late] = async_to_sync(_all)(first.claim(rows))
    second.claim(account)

    with pytest.raises(StaleFencingToken):
        late.save()


def test_a_claimed_queryset_is_what_it_was(database: str, name: str, account: Account) -> None:
    rows = Rows(Account, using=database).filter(pk=account.pk)

    with lock(name, using=database) as lease:
        claimed: Any = lease.claim(rows)

        assert isinstance(claimed, Rows)
        assert type(claimed).__name__ == "Rows"
        assert claimed.distlock() == "ours"
        assert [*claimed.values_list("balance", flat=True)] == [100]
        assert [row["balance"] for row in claimed.values("balance")] == [100]
        assert claimed.count() == 1


def test_rows_that_were_not_claimed_are_not_given_as_claimed_ones(
    database: str, name: str, account: Account
) -> None:
    accounts = Rows(Account, using=database)
    other = accounts.create(name=name, balance=1, opening_balance=1)
    mine, theirs = accounts.filter(pk=account.pk), accounts.filter(pk=other.pk)

    with lock(name, using=database) as lease:
        for mixed in (lease.claim(mine) | theirs, theirs | lease.claim(mine)):
            for _ in range(2):
                with pytest.raises(StaleFencingToken, match=r"not claimed by this lease"):
                    list(mixed)
        with pytest.raises(StaleFencingToken, match=r"not claimed by this lease"):
            list(lease.claim(mine).order_by().union(theirs.order_by()))
    other.delete()


def test_what_gives_no_instances_is_refused(database: str, name: str, account: Account) -> None:
    rows = Rows(Account, using=database).filter(pk=account.pk)

    with lock(name, using=database) as lease:
        with pytest.raises(TypeError, match="cannot protect a str: it has no fence"):
            list(lease.claim(rows.read_by(Names)))
        with pytest.raises(TypeError, match="Fee has no fence: let it inherit FencedModel"):
            lease.claim(Fee.objects.using(database).all())
        targets: list[Any] = [Account.objects, Account.objects.raw("SELECT 1"), Account, None]
        for target in targets:
            with pytest.raises(TypeError, match="takes a saved instance or a queryset, not"):
                lease.claim(target)


def test_all_columns_are_read_at_once(database: str, name: str, account: Account) -> None:
    rows = Rows(Account, using=database).filter(pk=account.pk)

    with lock(name, using=database) as lease:
        for some in (rows.only("name"), rows.defer("balance", "fence")):
            [row] = lease.claim(some)
            assert row.get_deferred_fields() == set()
            assert row.fence == lease.fencing_token
