"""The tests of users: in new projects, run by Django's runner and by pytest, on each kind of database."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from django.core.management import call_command

from django_distlock.conf import DEFAULT_BACKEND

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fixtures.mariadb import MariaDB
    from tests.fixtures.postgres import PostgreSQL
    from tests.fixtures.redis import Redis

CHECKOUT = Path(__file__).resolve().parents[2]
#: How users start their tests.
RUNNERS = {
    "django": ["manage.py", "test"],
    "django-parallel": ["manage.py", "test", "--parallel=2"],
    "pytest": ["-m", "pytest", "-q", "-p", "no:randomly"],
    "pytest-xdist": ["-m", "pytest", "-q", "-p", "no:randomly", "-n2"],
}
ROWS = "django_distlock.backends.rowlock.RowLockBackend"
#: The database of a new project, which is in memory in tests.
IN_MEMORY = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.sqlite3"}}
pytestmark = pytest.mark.timeout(180)

SETTINGS = """
import os
if os.environ.get("MYSQL_DRIVER") != "mysqlclient":
    import pymysql
    pymysql.version_info = (2, 2, 7, "final", 0)
    pymysql.install_as_MySQLdb()
INSTALLED_APPS += ["django_distlock", "bank"]
ROOT_URLCONF = "bank.views"
DATABASES = {databases!r}
DISTLOCK = {distlock!r}
"""

MODELS = """
from django.db import models
from django_distlock.models import FencedModel

class Account(FencedModel):
    balance = models.IntegerField(default=0)
"""

VIEWS = """
from django.db import transaction
from django.http import HttpResponse
from django.urls import path
from django_distlock import distributed_lock, lock, respond

from .models import Account

@distributed_lock("pay:{number}", timeout=0, on_busy=respond(409))
def pay(request, number):
    return HttpResponse("paid")

@distributed_lock("plain", timeout=0, on_busy=respond(409))
async def apay(request):
    return HttpResponse("paid")

@transaction.atomic
def write(request):
    with lock("view", release="on_commit", timeout=0):
        Account.objects.create()
    return HttpResponse("written")

urlpatterns = [path("pay/<int:number>/", pay), path("apay/", apay), path("write/", write)]
"""

TESTS = '''
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError
from urllib.request import urlopen

from django.core import mail
from django.core.management import call_command
from django.db import connection, transaction
from django.test import LiveServerTestCase, SimpleTestCase, TestCase, TransactionTestCase
from django_distlock import (
    LockError, LockNotAcquired, StaleFencingToken, lock, locks, transaction_lock,
)

from .models import Account


def is_free(name, **wishes):
    """Tell whether another thread gets the lock."""
    def take():
        try:
            with lock(name, timeout=0, **wishes):
                return True
        except LockNotAcquired:
            return False
        finally:
            connection.close()
    with ThreadPoolExecutor(1) as other:
        return other.submit(take).result()


class Locks:
    """What works without a database."""

    def test_a_lock_excludes_others_and_is_freed(self):
        with lock("x") as lease:
            assert lease.fencing_token
            assert not is_free("x")
        assert is_free("x")

    def test_b_lock_that_is_left_behind(self):
        type(self).left = lock("left").acquire()
        assert self.left
        self.left.detach()
        type(self).left = lock("left too").acquire()

    def test_c_is_free_in_the_next_test(self):
        assert is_free("left")
        assert is_free("left too")
        with lock("left too", reentrant=False, timeout=0):
            pass

    def test_a_test_inside_of_it_ends_no_lock_of_it(self):
        class Inside(SimpleTestCase):
            def test_it(self):
                pass

        with lock("x") as lease:
            assert Inside("test_it").run().wasSuccessful()
            assert is_free("y")
            lease.check()

    def test_lock_outlives_the_mails(self):
        with lock("x") as lease:
            mail.outbox = []
            assert is_free("y")
            lease.check()

    def test_locks_are_listed_and_purged(self):
        with lock("x"):
            assert [held.name for held in locks["default"].held()] == ["x"]
        call_command("purge_stale_locks", using=["default"], verbosity=0)

    def test_decorated_view(self):
        assert self.client.get("/pay/1/").content == b"paid"
        with ThreadPoolExecutor(1) as other:
            lease = other.submit(lock("pay:1", timeout=0).acquire).result()
            assert self.client.get("/pay/1/").status_code == 409
            assert self.client.get("/pay/2/").status_code == 200
            other.submit(lease.release).result()
        assert self.client.get("/pay/1/").status_code == 200

    async def test_async_code(self):
        async with lock("x") as lease:
            assert lease.held
        assert (await self.async_client.get("/apay/")).content == b"paid"


class Transactions:
    """What has to do with the database; each test has written before."""

    def setUp(self):
        self.account = Account.objects.create(balance=1)

    def test_guard(self):
        for _ in range(2):
            with lock("x", timeout=1) as lease, transaction.atomic():
                lease.guard()
                Account.objects.update(balance=2)

    def test_later_holder_waits_for_a_guarded_transaction(self):
        with transaction.atomic():
            lease = lock("x").acquire()
            lease.guard()
            lease.give_back_now()
            assert not is_free("x")
        with transaction.atomic():
            assert is_free("x")

    def test_guard_needs_a_block_of_its_own(self):
        with self.assertRaisesMessage(LockError, "call it inside atomic("):
            with lock("x") as lease:
                lease.guard()

    def test_claim_and_save(self):
        with lock("x") as lease:
            account = lease.claim(self.account)
            account.balance += 1
            lease.save(account)
            assert lease.update(Account.objects.filter(pk=account.pk), balance=3) == 1
        with lock("x") as later:
            later.claim(account)
        with self.assertRaises(LockError):
            lease.save(account)

    def test_transaction_lock(self):
        for _ in range(2):
            with transaction.atomic():
                transaction_lock("x", timeout=0)
                transaction_lock("x", timeout=0)
                Account.objects.update(balance=5)

    def test_rolled_back_savepoint_frees_nothing(self):
        def try_it():
            try:
                with transaction.atomic():
                    transaction_lock("x", timeout=0)
                    return True
            except LockNotAcquired:
                return False
            finally:
                connection.close()
        with ThreadPoolExecutor(1) as other:
            with transaction.atomic():
                transaction_lock("x")
                lease = lock("x").acquire()
                lease.guard()
                lease.give_back_now()
                with self.assertRaises(KeyError), transaction.atomic():
                    transaction_lock("x")
                    raise KeyError
                assert not other.submit(try_it).result()
                assert not is_free("x")
            assert other.submit(try_it).result()
            assert is_free("x")

    def test_transaction_lock_needs_a_block_of_its_own(self):
        with self.assertRaisesMessage(LockError, "call it inside atomic("):
            transaction_lock("x")

    def test_view_that_releases_on_commit(self):
        assert self.client.get("/write/").content == b"written"
        assert Account.objects.count() == 2


class SimpleTests(Locks, SimpleTestCase):
    pass


class Tests(Transactions, Locks, TestCase):
    def test_release_on_commit(self):
        with self.captureOnCommitCallbacks(execute=True) as callbacks:
            with transaction.atomic():
                with lock("x", release="on_commit"):
                    Account.objects.update(balance=5)
                assert not is_free("x")
                transaction.on_commit(int)
        assert is_free("x")


class TransactionTests(Transactions, TransactionTestCase):
    def test_release_on_commit(self):
        with transaction.atomic():
            with lock("x", release="on_commit"):
                Account.objects.update(balance=5)
            assert not is_free("x")
        assert is_free("x")


class LiveServerTests(LiveServerTestCase):
    def test_view(self):
        assert urlopen(f"{self.live_server_url}/pay/1/").read() == b"paid"
        with lock("pay:1"):
            with self.assertRaises(HTTPError) as caught:
                urlopen(f"{self.live_server_url}/pay/1/")
        assert caught.exception.code == 409
        assert urlopen(f"{self.live_server_url}/write/").read() == b"written"
'''

PYTESTS = """
import pytest
from django_distlock import lock, locks

def test_a_lock_that_is_left_behind():
    assert lock("left").acquire()
    assert type(locks["default"]).__name__ == "LocMemBackend"

def test_b_is_free_in_the_next_test():
    with lock("left", reentrant=False, timeout=0):
        pass

@pytest.mark.django_db
def test_of_a_database():
    from bank.models import Account
    Account.objects.create()
    with lock("x") as lease:
        lease.claim(Account.objects.get())
"""

#: For aliases that keep their real backends.
REAL = """
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from django.conf import settings
from django.db import connection, transaction
from django.test import TestCase, TransactionTestCase
from django_distlock import LockBackendError, LockNotAcquired, lock, locks

from .models import Account
from .tests import is_free

REAL = [alias for alias in settings.DISTLOCK if alias != "default"]
# Tests that run side by side share a real server.
X = f"x:{os.getpid()}"


class Real:
    def setUp(self):
        self.account = Account.objects.create(balance=1)

    def test_backends_are_real(self):
        for alias in REAL:
            assert type(locks[alias]).__name__ != "LocMemBackend"

    def test_lock_excludes_others_and_is_freed(self):
        for alias in REAL:
            with lock(X, using=alias) as lease:
                lease.claim(self.account)
                assert not is_free(X, using=alias)
            assert is_free(X, using=alias)

    def test_z_others_wait(self):
        for alias in REAL:
            with ThreadPoolExecutor(1) as other:
                lease = lock(X, using=alias).acquire()
                waiting = other.submit(lambda: lock(X, using=alias, timeout=5).__enter__().release())
                time.sleep(0.5)
                assert "distlock-listen" not in str(threading.enumerate())  # on a connection
                lease.release()
                waiting.result()

    def test_a_lock_that_is_left_behind(self):
        for alias in {*REAL} - {"rows"}:  # it would be in the way of the TRUNCATE after the test
            assert lock("left", using=alias).acquire()

    def test_b_is_free_in_the_next_test(self):
        for alias in REAL:
            assert is_free("left", using=alias)

    def test_guard(self):
        if "leases" in REAL:
            with lock(X, using="leases") as lease, transaction.atomic():
                lease.guard()

class RealTransactionTests(Real, TransactionTestCase):
    pass


if "leases" in REAL and connection.vendor == "sqlite":
    class RealTests(TestCase):
        def test_error_says_what_works(self):
            Account.objects.create(balance=1)
            with self.assertRaisesRegex(LockBackendError, "TransactionTestCase"):
                lock(X, using="leases").acquire()
else:
    class RealTests(Real, TestCase):
        pass
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """Run the tests of a new project whose *databases* and *distlock* these are, and return the output."""

    def run(runner: str, databases: dict[str, Any], **distlock: Any) -> str:
        known = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("COVERAGE", "DISTLOCK", "PYTEST", "DJANGO"))
        }
        environment = {
            **known,
            "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{tmp_path}",
            "DJANGO_SETTINGS_MODULE": "shop.settings",
            "MYSQL_DRIVER": os.environ.get("DISTLOCK_MYSQL_DRIVER", ""),
        }

        def call(*command: str) -> str:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            printed = done.stdout + done.stderr
            assert done.returncode == 0, printed
            return printed

        call_command("startproject", "shop", str(tmp_path))
        settings = SETTINGS.format(databases=databases, distlock={"default": {}, **distlock})
        with (tmp_path / "shop" / "settings.py").open("a") as file:
            file.write(settings)
        sources = {"models": MODELS, "views": VIEWS, "tests": TESTS, "__init__": ""}
        if distlock:
            sources["tests_real"] = REAL  # last, so that what is left open then is found
        if runner.startswith("pytest"):
            sources["test_functions"] = PYTESTS
        (tmp_path / "bank").mkdir()
        for name, source in sources.items():
            (tmp_path / "bank" / f"{name}.py").write_text(source)
        (tmp_path / "pytest.ini").write_text("[pytest]\npython_files = test*.py\n")
        return call("-W", "default", *RUNNERS[runner])

    return run


def kept(backend: str = DEFAULT_BACKEND, **options: Any) -> dict[str, Any]:
    """Return an alias that keeps its own backend in tests."""
    return {"BACKEND": backend, "OPTIONS": options, "TEST": {"BACKEND": None}}


def test_sqlite_in_memory(run: Callable[..., str]) -> None:
    run("django", IN_MEMORY, leases=kept())


def test_sqlite_in_a_file(run: Callable[..., str], tmp_path: Path) -> None:
    alias = {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(tmp_path / "shop.sqlite3"),
        "TEST": {"NAME": str(tmp_path / "test.sqlite3")},
    }
    run("pytest-xdist", {"default": alias}, leases=kept())

    assert not list(tmp_path.glob("*.sqlite3*"))


def server(kind: str, port: int, user: str) -> dict[str, Any]:
    """Return a database alias."""
    where = {"HOST": "127.0.0.1", "PORT": port, "NAME": "shop", "USER": user, "PASSWORD": user}
    return {"default": {"ENGINE": f"django.db.backends.{kind}", **where}}


@pytest.mark.parametrize("runner", ["django-parallel", "pytest"])
def test_postgresql(run: Callable[..., str], runner: str, postgres: PostgreSQL) -> None:
    aliases = {"leases": kept(fair=True), "rows": kept(ROWS)}
    run(runner, server("postgresql", postgres.port, "distlock"), **aliases)

    with postgres.admin() as connection:
        left = connection.execute("SELECT datname FROM pg_database WHERE datname LIKE 'test%'")
        assert left.fetchall() == []


def test_mariadb(run: Callable[..., str], mariadb: MariaDB) -> None:
    # Not parallel: Django clones its databases by mysqldump, which is not here.
    run("django", server("mysql", mariadb.port, "admin"), leases=kept(), rows=kept(ROWS))

    with mariadb.admin() as connection, connection.cursor() as cursor:
        assert cursor.execute("SHOW DATABASES LIKE 'test%'") == 0


def test_redis(run: Callable[..., str], redis: Redis) -> None:
    location = {"location": f"redis://127.0.0.1:{redis.port}/3"}
    alias = kept("django_distlock.backends.redis.RedisBackend", **location)
    run("pytest-xdist", IN_MEMORY, redis=alias | {"KEY_PREFIX": "xdist"})
