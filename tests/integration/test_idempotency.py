"""@idempotent in every framework: stored after the commit, and what a client sees when a worker is killed."""

from __future__ import annotations

import functools
import json
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from django.core.cache import caches
from django.core.cache.backends.locmem import LocMemCache
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.management import call_command
from django.db import IntegrityError, connection, connections, transaction
from django.test import Client
from django.test.client import BOUNDARY, MULTIPART_CONTENT, encode_multipart

from django_distlock import locks
from django_distlock.signals import lock_released
from testproject.models import Account, Fee
from testproject.settings import CACHES, DISTLOCK
from tests.contract.crew import listening
from tests.fixtures.eventually import eventually
from tests.fixtures.workers import Answer, Site

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_django.fixtures import Settings

SITE = "tests.integration.idempotent_site"
ALL = (
    *("function", "dispatch", "method", "rest", "rest-dispatch", "rest-below", "rest-above"),
    "ninja",
)
#: As createcachetable makes it.
CREATE = "CREATE TABLE kept_answers (cache_key varchar(255) PRIMARY KEY, value text NOT NULL, expires timestamptz NOT NULL)"
#: What happened, and whether a transaction was open then.
journal: list[tuple[str, bool]] = []


class TellingCache(LocMemCache):
    """Notes when an answer is stored."""

    def add(self, *args: Any, **kwargs: Any) -> bool:
        journal.append(("stored", connection.in_atomic_block))
        return super().add(*args, **kwargs)


@pytest.fixture(autouse=True)
def _site(settings: Settings) -> None:
    settings.ROOT_URLCONF = SITE
    settings.MIDDLEWARE = []
    settings.CACHES = {**settings.CACHES, "answers": {"BACKEND": f"{__name__}.TellingCache"}}
    caches["answers"].clear()


@pytest.fixture
def atomic_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)


def post(page: str, account: Account, data: Any = None, **headers: str) -> Any:
    headers = {"idempotency-key": "k", "accept": "application/json", **headers}
    client = Client(raise_request_exception=False)
    body = {"amount": 5} if data is None else data
    return client.post(f"/{page}/{account.pk}/", body, "application/json", headers=headers)


def fees(account: Account) -> int:
    return Fee.objects.filter(account=account).count()


@pytest.mark.parametrize("page", [*ALL, "own-transaction", "without-transaction"])
@pytest.mark.parametrize("is_atomic", [False, True])
def test_a_request_is_done_once(
    page: str, is_atomic: bool, account: Account, request: pytest.FixtureRequest
) -> None:
    if is_atomic:
        request.getfixturevalue("atomic_requests")

    first, second, other = (post(page, account, data) for data in [None, None, {"amount": 6}])

    assert (first.status_code, second.status_code, other.status_code) == (200, 200, 422)
    assert first.content == second.content
    assert first.json()["fee"]
    assert second["Idempotency-Replayed"] == "true"
    assert second["Content-Type"] == first["Content-Type"]
    assert fees(account) == 1


@pytest.mark.parametrize(
    ("page", "kind"), [("rest", MULTIPART_CONTENT), ("rest-upload", "text/plain")]
)
def test_files_that_the_rest_framework_has_read_are_compared(
    page: str, kind: str, account: Account
) -> None:
    def put(text: bytes) -> int:
        files = {"file": [SimpleUploadedFile("a", b"1"), SimpleUploadedFile("a", text)]}
        body = encode_multipart(BOUNDARY, files) if page == "rest" else text
        headers = {"idempotency-key": "k", "content-disposition": "attachment; filename=a"}
        return Client().put(f"/{page}/{account.pk}/", body, kind, headers=headers).status_code

    assert [put(text) for text in [b"1", b"1", b"2"]] == [200, 200, 422]
    assert fees(account) == 1


def test_the_parsers_of_a_view_of_the_rest_framework_parse_a_form_with_files(
    account: Account,
) -> None:
    def sent(page: str, name: str) -> Any:
        file = SimpleUploadedFile("a", b"1")
        data = {"data": json.dumps({"owner": {"name": name}}), "file": file}
        url, headers = f"/{page}/{account.pk}/", {"idempotency-key": page}
        return Client().post(url, data, headers=headers)

    first, second, other = (sent("rest-parsed", name) for name in ("Ada", "Ada", "Bob"))

    assert first.json()["name"] == second.json()["name"] == "Ada"
    assert other.status_code == 422
    assert sent("rest-of-json", "Ada").status_code == 415  # its parser takes no forms
    assert sent("own-attribute", "Ada").status_code == 200
    assert fees(account) == 2


@pytest.mark.usefixtures("atomic_requests")
@pytest.mark.parametrize("page", ALL)
def test_it_is_stored_after_the_commit_and_before_the_lock_is_free(
    page: str, account: Account
) -> None:
    def released(name: str, **_: Any) -> None:
        if name.startswith("idempotent:"):
            journal.append(("released", connection.in_atomic_block))

    journal.clear()
    with listening(lock_released, released):
        post(page, account)

    assert journal == [("stored", False), ("released", False)]


@pytest.mark.usefixtures("atomic_requests")
@pytest.mark.parametrize("failure", ["raise", "lose", "at the commit"])
@pytest.mark.parametrize("page", ALL)
def test_what_is_rolled_back_is_not_stored(
    page: str, failure: str, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise IntegrityError("a deferred constraint")

    with monkeypatch.context() as broken:
        if failure == "at the commit":
            broken.setattr(connection, "_commit", fail)
        assert post(page, account, **{"x-fail": failure}).status_code == 500
    assert fees(account) == 0
    assert "Idempotency-Replayed" not in post(page, account)
    assert fees(account) == 1


@pytest.mark.usefixtures("atomic_requests")
def test_a_lock_that_is_lost_after_the_commit_is_logged(
    account: Account, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (
        post("function", account, **{"x-fail": "lose at the commit"}) for _ in range(2)
    )

    assert (first.status_code, second.status_code) == (200, 200)
    assert second["Idempotency-Replayed"] == "true"
    assert "Leaving lock idempotent:answers:" in caplog.text


# In a table of the same database.


@pytest.fixture
def table(settings: Settings) -> Iterator[None]:
    """The answers are in a table of the database of the work."""
    backend = "django.core.cache.backends.db.DatabaseCache"
    settings.CACHES = {"answers": {"BACKEND": backend, "LOCATION": "kept_answers"}}
    call_command("createcachetable", verbosity=0)
    yield
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE kept_answers")


@pytest.mark.usefixtures("atomic_requests", "table")
@pytest.mark.parametrize("page", ["function", "method", "rest", "own-transaction"])
def test_in_a_table_it_is_committed_with_the_work(page: str, account: Account) -> None:
    with pytest.raises(LookupError), transaction.atomic():
        assert post(page, account).status_code == 200
        raise LookupError
    assert fees(account) == 0

    assert "Idempotency-Replayed" not in post(page, account)
    assert post(page, account)["Idempotency-Replayed"] == "true"
    assert fees(account) == 1


def test_the_answer_is_not_kept_of_work_that_an_inner_block_rolls_back(account: Account) -> None:
    with transaction.atomic(), suppress(LookupError), transaction.atomic():
        assert post("function", account).status_code == 200
        raise LookupError
    assert fees(account) == 0

    assert "Idempotency-Replayed" not in post("function", account)
    assert fees(account) == 1


@pytest.mark.usefixtures("atomic_requests")
@pytest.mark.parametrize("is_in_table", [True, False])
def test_an_error_of_the_rest_framework_that_is_answered_rolls_back(
    account: Account, request: pytest.FixtureRequest, is_in_table: bool
) -> None:
    if is_in_table:
        request.getfixturevalue("table")

    answers = [post("rest-dispatch", account, {"amount": "wrong"}) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [400, 400]
    assert "Idempotency-Replayed" not in answers[1]
    assert fees(account) == 0


@pytest.mark.usefixtures("atomic_requests", "table")
def test_work_whose_answer_the_table_refuses_is_rolled_back(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(type(caches["answers"]), "add", lambda *args, **kwargs: False)
        assert post("function", account).status_code == 500
    assert fees(account) == 0
    assert post("function", account).status_code == 200


# Four workers, of which some are killed.

WORKERS, TTL = 4, 2
StartSite = Callable[..., Site]
REDIS, TABLE = "DyingRedisCache", "DyingDatabaseCache"


@pytest.fixture(scope="module")
def start_site(postgres: object, redis: object, open_site: StartSite) -> Iterator[StartSite]:
    """Start a site over PostgreSQL, with locks in Redis, and answers in this kind of cache, once for each."""

    @functools.cache
    def start(kind: str, server: str = "gunicorn-sync") -> Site:
        location = CACHES["redis_cache"]["LOCATION"] if kind == REDIS else "kept_answers"
        return open_site(
            server,
            {**DISTLOCK["redis"], "TTL": TTL},
            workers=WORKERS if server == "gunicorn-sync" else 1,
            DISTLOCK_ATOMIC_DATABASE="postgres",
            DISTLOCK_WORKERS_URLS=SITE,
            DISTLOCK_WORKERS_ANSWERS=json.dumps(
                {"BACKEND": f"{SITE}.{kind}", "LOCATION": location}
            ),
        )

    with connections["postgres"].cursor() as cursor:
        cursor.execute(CREATE)
    yield start
    with connections["postgres"].cursor() as cursor:
        cursor.execute("DROP TABLE kept_answers")


@pytest.fixture
def remote() -> Iterator[Account]:
    """An account in the database of the workers."""
    account = Account(name="Ada", balance=100, opening_balance=100)
    account.save(using="postgres")
    yield account
    account.delete(using="postgres")


def fees_of(account: Account) -> int:
    return Fee.objects.using("postgres").filter(account=account).count()


@pytest.mark.parametrize("kind", [REDIS, TABLE])
@pytest.mark.parametrize("page", ["function", "method", "without-transaction"])
def test_of_equal_requests_at_once_one_is_done(
    kind: str, page: str, start_site: StartSite, remote: Account
) -> None:
    site, key = start_site(kind), uuid.uuid4().hex

    with ThreadPoolExecutor(2 * WORKERS) as clients:
        answers = list(clients.map(lambda _: answer_to(site, page, remote, key), range(40)))

    assert len({(answer.status, str(answer.body)) for answer in answers}) == 1
    assert answers[0].status == 200
    assert fees_of(remote) == 1


def test_without_the_decorator_each_is_done(start_site: StartSite, remote: Account) -> None:
    for _ in range(2):
        assert answer_to(start_site(REDIS), "unprotected", remote, "k").status == 200
    assert fees_of(remote) == 2


@pytest.mark.parametrize(
    ("kind", "page", "where", "done"),
    [
        (REDIS, "function", "view", 1),
        (REDIS, "function", "store", 2),
        (REDIS, "method", "store", 2),
        (TABLE, "without-transaction", "store", 2),
        (TABLE, "function", "store", 1),
        (TABLE, "function", "commit", 1),
        (TABLE, "method", "commit", 1),
        (TABLE, "own-transaction", "commit", 1),
    ],
)
def test_work_of_a_killed_worker_is_done_again_only_if_it_was_committed_without_its_answer(  # noqa: PLR0917 - a table
    kind: str, page: str, where: str, done: int, start_site: StartSite, remote: Account
) -> None:
    site, key = start_site(kind), uuid.uuid4().hex
    path = f"{page}/{remote.pk}/"

    assert site.post(path, **{"idempotency-key": key, "x-die": where}).status == 0
    assert answer_to(site, page, remote, key).status == 200
    assert fees_of(remote) == done


def test_an_async_view_goes_on_if_its_client_has_gone(
    start_site: StartSite, remote: Account
) -> None:
    site, key = start_site(REDIS, "uvicorn"), uuid.uuid4().hex
    purpose, form = f"POST /slow/{remote.pk}/", "application/x-www-form-urlencoded"

    with site.begin(purpose[6:], "POST", **{"idempotency-key": key, "content-type": form}):
        held = locks["redis"].held
        eventually(lambda: purpose in [each.holder.purpose for each in held() if each.holder], 20)

    assert fees_of(remote) == 0
    assert answer_to(site, "slow", remote, key).status == 200
    assert fees_of(remote) == 1


def answer_to(site: Site, page: str, account: Account, key: str) -> Answer:
    """Return the answer to a client that comes again while it is told to."""
    answers = []

    def has_answered() -> bool:
        answers.append(site.post(f"{page}/{account.pk}/", **{"idempotency-key": key}))
        return answers[-1].status != 409

    eventually(has_answered, 30)
    return answers[-1]
