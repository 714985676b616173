"""Fenced data whose model inherits a table: the fence may stand in another table than what is written."""

# ruff: noqa: DJ008 - nobody reads these rows

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from django.db import OperationalError, connections, models, transaction
from django.test.utils import isolate_apps
from hypothesis import (
    HealthCheck,
    Phase,
    assume,
    given,
    settings as hypothesis_settings,
    strategies as some,
)

from django_distlock import StaleFencingToken
from django_distlock.models import FencedModel
from tests.backends.conftest import SERVERS, apart, isolated
from tests.backends.test_claimed_querysets import AskingAgain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from django_distlock import Lease

#: Seconds after which a statement that has not come back is taken to wait for the other holder.
PATIENCE = 0.02

with isolate_apps("testproject"):

    class Purse(FencedModel):
        """What has the fence and the money."""

        balance = models.IntegerField(default=100)

        class Meta:
            app_label = "testproject"

    class Coin(models.Model):
        """What makes a join give a purse several times."""

        purse = models.ForeignKey(Purse, on_delete=models.CASCADE, related_name="coins")

        class Meta:
            app_label = "testproject"

    class Savings(Purse):
        """One level below."""

        bonus = models.IntegerField(default=0)

        class Meta:
            app_label = "testproject"

    class Gold(Savings):
        """Two levels below."""

        carat = models.IntegerField(default=24)

        class Meta:
            app_label = "testproject"

    class ShownGold(Gold):
        """As it is shown."""

        class Meta:
            app_label = "testproject"
            proxy = True

    class Dated(FencedModel):
        """Abstract, between the fence and the table."""

        class Meta:
            abstract = True

    class Bond(Dated):
        """All in one table."""

        balance = models.IntegerField(default=100)

        class Meta:
            app_label = "testproject"

    class Plain(models.Model):
        """The money, with no fence."""

        balance = models.IntegerField(default=100)

        class Meta:
            app_label = "testproject"

    class Pocket(FencedModel):
        """One of several that belong together."""

        plain = models.ForeignKey(Plain, on_delete=models.CASCADE, related_name="pockets")
        balance = models.IntegerField(default=100)

        class Meta:
            app_label = "testproject"

    class FencedLater(FencedModel, Plain):
        """The fence below the money."""

        class Meta:
            app_label = "testproject"

    class Coded(models.Model):
        """Something with a key of its own."""

        code = models.CharField(max_length=20, primary_key=True)

        class Meta:
            app_label = "testproject"

    class CodedPurse(Coded, Purse):
        """Its key is not that of the row with the fence."""

        class Meta:
            app_label = "testproject"


TABLES: list[type[models.Model]] = [
    *(Purse, Coin, Savings, Gold, Bond, Plain, Pocket, FencedLater, Coded, CodedPurse)
]
SHAPES: list[type[Any]] = [Purse, Savings, Gold, ShownGold, Bond, FencedLater, CodedPurse]
#: One table, the fence above, the fence below, another key: what orders of statements may matter for.
APART: list[type[Any]] = [Purse, Gold, FencedLater, CodedPurse]


@pytest.fixture(scope="module")
def made() -> Iterator[set[str]]:
    """The databases that have the tables."""
    aliases: set[str] = set()
    yield aliases
    for alias in aliases:
        with connections[alias].schema_editor() as editor:
            for model in reversed(TABLES):
                editor.delete_model(model)


def make_tables(alias: str, made: set[str]) -> None:
    if alias not in made:
        made.add(alias)
        with connections[alias].schema_editor() as editor:
            for model in TABLES:
                editor.create_model(model)


@pytest.fixture
def tables(database: str, made: set[str]) -> str:
    make_tables(database, made)
    return database


def rows_of(model: type[models.Model], alias: str) -> models.QuerySet[Any]:
    return models.QuerySet(model, using=alias)


def new(shape: type[Any], alias: str, name: str) -> Any:
    known = {"code": name} if issubclass(shape, Coded) else {}
    return shape._base_manager.using(alias).create(**known)


def fresh(row: Any) -> Any:
    return type(row)._base_manager.using(row._state.db).get(pk=row.pk)


# Two holders, statement by statement.


def by_save(lease: Lease, row: Any) -> None:
    claimed = lease.claim(row)
    claimed.balance -= 3
    lease.save(claimed)


def by_save_of_one_field(lease: Lease, row: Any) -> None:
    claimed = lease.claim(row)
    claimed.balance -= 3
    lease.save(claimed, update_fields=["balance"])


def by_save_of_what_is_loaded(lease: Lease, row: Any) -> None:
    lease.claim(row)
    loaded = type(row)._base_manager.using(row._state.db).only("balance").get(pk=row.pk)
    loaded.balance -= 3
    lease.save(loaded)


def by_an_expression(lease: Lease, row: Any) -> None:
    claimed = lease.claim(row)
    claimed.balance = models.F("balance") - 3
    lease.save(claimed)


def by_update(lease: Lease, row: Any) -> None:
    rows = lease.claim(type(row)._base_manager.using(row._state.db).filter(pk=row.pk))
    lease.update(rows, balance=rows.get().balance - 3)


def by_reading_under_a_lock(lease: Lease, row: Any) -> None:
    lease.claim(row)
    with transaction.atomic(using=row._state.db):
        rows = type(row)._base_manager.using(row._state.db)
        locked = rows.select_for_update().get(pk=row.pk)
        locked.balance -= 3
        lease.save(locked)


def by_bulk_update(lease: Lease, row: Any) -> None:
    with transaction.atomic(using=row._state.db):
        claimed = lease.claim(row)
        claimed.balance -= 3
        type(row)._base_manager.using(row._state.db).bulk_update([claimed], ["balance"])


WAYS = [
    *(by_save, by_save_of_one_field, by_save_of_what_is_loaded, by_an_expression),
    *(by_update, by_reading_under_a_lock, by_bulk_update),
]


class Turns(threading.Thread):
    """A holder that takes a fee in a thread of its own, each statement and commit when it is let."""

    def __init__(self, lease: Lease, row: Any, way: Callable[[Lease, Any], None]) -> None:
        super().__init__()
        self._lease, self._row, self._way = lease, row, way
        self._turn = threading.Condition()
        self._stands = self._is_over = self._is_free = False
        self.fee = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        connection = connections[self._row._state.db]
        connection.ensure_connection()
        commit = connection.commit

        def commit_in_turn() -> None:
            self._stand()
            commit()

        try:
            with connection.execute_wrapper(self._execute_in_turn):
                connection.commit = commit_in_turn  # type: ignore[method-assign]  # of this thread's alone
                self._take_fee()
        except BaseException as error:  # noqa: BLE001 - told by the test
            self.error = error
        finally:
            connection.close()
            with self._turn:
                self._is_over = True
                self._turn.notify_all()

    def _take_fee(self) -> None:
        try:
            self._way(self._lease, self._row)
        except OperationalError:
            # Who locks rows by himself, in another order, may be ended as a deadlock: once more.
            self._way(self._lease, self._row)
        self.fee = 3

    def step(self) -> None:
        """Let it go to its next statement; it may have to wait for a row that the other has locked."""
        with self._turn:
            self._turn.wait_for(self._has_come, PATIENCE)
            if self._stands:
                self._stands = False
                self._turn.notify_all()
                self._turn.wait_for(self._has_come, PATIENCE)

    def finish(self) -> None:
        """Let it go to its end, once the other one stands nowhere in its way."""
        with self._turn:
            self._is_free, self._stands = True, False
            self._turn.notify_all()

    def _has_come(self) -> bool:
        return self._stands or self._is_over

    def _stand(self) -> None:
        with self._turn:
            self._stands = not self._is_free
            self._turn.notify_all()
            self._turn.wait_for(lambda: not self._stands)

    def _execute_in_turn(self, execute: Callable[..., Any], *statement: Any) -> Any:
        self._stand()
        return execute(*statement)


def play(
    holders: tuple[Lease, Lease],
    row: Any,
    ways: Sequence[Callable[[Lease, Any], None]],
    turns: Sequence[int],
) -> None:
    """Let both holders take a fee in these *turns*, and see that the row has lost each of them."""
    both = [Turns(lease, row, way) for lease, way in zip(holders, ways, strict=True)]
    for holder in both:
        holder.start()
    for turn in turns:
        both[turn].step()
    for holder in both:
        holder.finish()
    for holder in both:
        holder.join()

    late, next_one = both
    assert next_one.error is None
    assert late.error is None or isinstance(late.error, StaleFencingToken), late.error
    now = fresh(row)
    assert now.balance == 100 - late.fee - next_one.fee
    assert now.fence == holders[1].fencing_token


@pytest.mark.parametrize("database", SERVERS, indirect=True)
@pytest.mark.parametrize("shape", APART)
def test_no_fee_is_lost_wherever_the_next_holder_comes_between_the_statements_of_a_late_one(
    tables: str, shape: type[Any], holders: tuple[Lease, Lease], name: str
) -> None:
    for number in range(12):
        row = new(shape, tables, f"{name[5:]}{number}")

        play(holders, row, [by_save, by_save], [0] * number + [1] * 12)


@pytest.mark.parametrize("database", SERVERS, indirect=True)
@pytest.mark.parametrize("shape", APART)
@hypothesis_settings(
    max_examples=15,
    deadline=None,
    database=None,
    # To look for the fewest turns that fail takes longer than a test may take.
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    ways=some.tuples(some.sampled_from(WAYS), some.sampled_from(WAYS)),
    turns=some.lists(some.sampled_from([0, 1]), min_size=8, max_size=20),
)
def test_no_fee_is_lost_and_no_fence_goes_down_in_whatever_order_statements_come(
    tables: str,
    *,
    shape: type[Any],
    holders: tuple[Lease, Lease],
    name: str,
    ways: list[Callable[[Lease, Any], None]],
    turns: list[int],
) -> None:
    # Django's bulk_update() takes the key of the row for that of its parent.
    assume(shape is not CodedPurse or by_bulk_update not in ways)
    shape._base_manager.using(tables).all().delete()

    play(holders, new(shape, tables, name[5:]), ways, turns)


@pytest.fixture
def snapshots(mariadb: object, made: set[str]) -> Iterator[None]:
    """Have the application's transactions on MariaDB read as of their first query."""
    make_tables("mariadb", made)
    with isolated("mariadb", "repeatable read"):
        yield


def in_a_list(row: Any) -> models.QuerySet[Any]:
    return rows_of(type(row), "mariadb").filter(pk=row.pk)


def in_a_slice(row: Any) -> models.QuerySet[Any]:
    return in_a_list(row).order_by("pk")[:1]


@pytest.mark.server
@pytest.mark.parametrize("rows", [in_a_list, in_a_slice])
@pytest.mark.parametrize("shape", APART)
def test_claimed_rows_are_read_fresh_in_a_transaction_that_reads_an_older_snapshot(
    snapshots: None,
    shape: type[Any],
    rows: Callable[[Any], models.QuerySet[Any]],
    holders: tuple[Lease, Lease],
    name: str,
) -> None:
    row = new(shape, "mariadb", name[5:])

    with transaction.atomic(using="mariadb"):
        fresh(row)  # the snapshot
        apart("mariadb", lambda: by_save(holders[0], row))
        claimed = holders[1].claim(rows(row))

        assert [each.balance for each in claimed] == [97]
        assert claimed.get().balance == 97


@pytest.mark.server
def test_so_are_the_columns_that_an_iterable_of_its_own_asks_for(
    snapshots: None, holders: tuple[Lease, Lease], name: str
) -> None:
    row = new(Savings, "mariadb", name)
    rows = in_a_list(row)
    rows._iterable_class = AskingAgain

    with transaction.atomic(using="mariadb"):
        fresh(row)  # the snapshot
        apart("mariadb", lambda: in_a_list(row).update(bonus=5))
        [claimed] = holders[1].claim(rows)

        assert claimed.bonus == 5


# What else a fenced row can be, on each database.


@pytest.mark.parametrize("shape", SHAPES)
def test_row_of_any_shape_is_claimed_read_fresh_and_saved(
    tables: str, shape: type[Any], holders: tuple[Lease, Lease], name: str
) -> None:
    late, next_one = holders
    row = new(shape, tables, name[5:])
    shape._base_manager.using(tables).filter(pk=row.pk).update(balance=50)

    read_late = late.claim(row)
    claimed = next_one.claim(row)
    claimed.refresh_from_db()
    claimed.balance -= 10
    next_one.save(claimed)

    assert [fresh(row).balance, fresh(row).fence] == [40, next_one.fencing_token]
    for refused in (
        lambda: late.save(read_late),
        lambda: late.save(read_late, update_fields=["balance"]),
        lambda: late.save(fresh(row)),
        lambda: late.update(shape._base_manager.using(tables).filter(pk=row.pk), balance=1),
        lambda: late.claim(row),
        lambda: late.claim(shape._base_manager.using(tables).filter(pk=row.pk)),
    ):
        with pytest.raises(StaleFencingToken, match="later holder") as told:
            refused()
        assert (told.value.token, told.value.fence) == (late.fencing_token, next_one.fencing_token)
    assert [fresh(row).balance, fresh(row).fence] == [40, next_one.fencing_token]


@pytest.mark.parametrize("shape", SHAPES)
def test_new_row_with_the_key_of_one_that_is_not_claimed_does_not_overwrite_it(
    tables: str, shape: type[Any], holders: tuple[Lease, Lease], name: str
) -> None:
    row = new(shape, tables, name[5:])
    keys = {f.attname: getattr(row, f.attname) for f in shape._meta.concrete_fields if f.unique}

    with pytest.raises(StaleFencingToken, match=r"call lease\.claim"):
        holders[0].save(shape(**keys, balance=1), using=tables)

    assert fresh(row).balance == 100


@pytest.mark.server
def test_fence_is_that_of_the_database_which_is_written(
    request: pytest.FixtureRequest, made: set[str], holders: tuple[Lease, Lease], name: str
) -> None:
    both = [request.getfixturevalue(alias) and alias for alias in ("postgres", "mariadb")]
    late, next_one = holders
    for alias in both:
        make_tables(alias, made)
        Gold(pk=8_000_000).save(using=alias)
    here, there = (rows_of(Gold, alias).get(pk=8_000_000) for alias in both)

    claimed = late.claim(here)
    next_one.claim(there)

    with pytest.raises(StaleFencingToken):
        late.save(claimed, using=both[1])
    claimed.refresh_from_db(using=both[0])
    claimed.balance = 1
    late.save(claimed)
    assert [fresh(here).balance, fresh(there).balance] == [1, 100]
    for alias in both:
        rows_of(Gold, alias).filter(pk=8_000_000).delete()


# Querysets.


FORMS: dict[str, Callable[[models.QuerySet[Any]], models.QuerySet[Any]]] = {
    "distinct": lambda rows: rows.distinct(),
    "annotated": lambda rows: rows.annotate(number=models.Count("coins")).filter(number=2),
    "outer join": lambda rows: rows.filter(models.Q(coins__isnull=True) | models.Q(coins__gt=0)),
    "related": lambda rows: rows.select_related("purse_ptr"),
    "ordered by the join": lambda rows: rows.order_by("coins__pk"),
    "locked": lambda rows: rows.select_for_update(),
    "values": lambda rows: rows.values("balance"),
    "some fields": lambda rows: rows.only("bonus"),
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_no_server_can_lock_as_they_are_asked_for_are_claimed_and_updated(
    tables: str, form: str, holders: tuple[Lease, Lease], name: str
) -> None:
    late, next_one = holders
    row = new(Savings, tables, name)
    rows_of(Coin, tables).bulk_create([Coin(purse_id=row.pk) for _ in range(2)])
    rows = FORMS[form](rows_of(Savings, tables).filter(pk=row.pk))

    late.claim(rows)
    assert late.update(rows, balance=models.F("balance") - 10) == 1
    next_one.claim(rows)

    with pytest.raises(StaleFencingToken):
        late.update(rows, balance=1)
    assert next_one.update(rows, balance=models.F("balance") - 10, bonus=4) == 1
    assert [fresh(row).balance, fresh(row).bonus] == [80, 4]
