"""What every test has: plugins, an open database, and the marker `server` where it belongs."""

import faulthandler
import gc
import os
import signal
import sys
import zlib
from collections.abc import Iterator
from inspect import isfunction

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it puts in the background like this. Processes of the tests are to hear of Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = [
    "tests.fixtures.browser",
    "tests.fixtures.celery_worker",
    "tests.fixtures.certificate",
    "tests.fixtures.clocks",
    "tests.fixtures.databases",
    "tests.fixtures.etcd",
    "tests.fixtures.memcached",
    "tests.fixtures.pgbouncer",
    "tests.fixtures.pods",
    "tests.fixtures.processes",
    "tests.fixtures.redis_servers",
    "tests.fixtures.zookeeper",
]

# Ask for one of these, directly, through another fixture or by a parameter, and the test needs a server.
# Those of a group are run together, beside the other groups: see tools/run-all-tests.
SERVER_FIXTURES = {
    "postgres": "postgres",
    "pgbouncer": "postgres",
    "mariadb": "mariadb",
    "memcached": "caches",
    "redis": "caches",
    "redis_sentinel": "caches",
    "redis_cluster": "caches",
    "redis_five": "caches",
    "zookeeper": "zookeeper",
    "own_ensemble": "zookeeper",
    "etcd": "zookeeper",
    "own_cluster": "zookeeper",
}


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """Have what nobody closed complain in the module that left it, and not in a test that comes later."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def nothing_is_declared() -> None:
    """Hide from `manage.py check` what other tests have decorated, for aliases of their own."""
    from django_distlock.handler import declared

    declared.clear()


@pytest.fixture(scope="session", autouse=True)
def locks_are_real() -> Iterator[None]:
    """Keep every alias on its own backend: that is what is tested here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("django_distlock.conf.tests_run", bool)
        yield


@pytest.fixture
def is_never_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a lost reply asked for again, however late it is found out."""
    monkeypatch.setattr("django_distlock.engine.steps.SETTLE", 30.0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        default="1/1",
        help="run a part of the tests, each function in one of them: 2/3 is the second of three",
    )


# First, since the tests of a function, hundreds in the contract, are made by the others.
@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(
    collector: pytest.Collector, name: str, obj: object
) -> list[pytest.Item] | None:
    of_others = isfunction(obj) and not _in_part(collector.config, f"{collector.nodeid}::{name}")
    return [] if of_others else None


# First, since the marker decides what `-m "not server"` leaves out.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # What is no function, like an example of the docs, has been collected in every part.
    others = {item for item in items if not _in_part(config, item.nodeid.partition("[")[0])}
    if others:
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
    for item in items:
        # A test on two servers belongs to the last group, by the order above.
        servers = _servers_of(item)
        groups = [group for name, group in SERVER_FIXTURES.items() if name in servers]
        if groups:
            item.add_marker(pytest.mark.server)
            item.add_marker(groups[-1])
        if not _is_quick(item.nodeid):
            item.add_marker(pytest.mark.slow)


def _in_part(config: pytest.Config, function: str) -> bool:
    """Tell by a function's name, the same in each run: ids of parameters need not be."""
    part, parts = map(int, config.getoption("part").split("/"))
    return zlib.crc32(function.encode()) % parts == part - 1


def pytest_collection_finish() -> None:
    # What all tests share stays to the end, and need not be looked at in every collection.
    gc.collect()
    gc.freeze()


def _servers_of(item: pytest.Item) -> set[object]:
    """Return the fixtures and parameters of a test, the fixtures of a contract's profile among them."""
    named: set[object] = set(getattr(item, "fixturenames", ()))
    for value in item.callspec.params.values() if hasattr(item, "callspec") else ():
        several = getattr(value, "fixtures", value)
        named |= set(several) if isinstance(several, tuple) else {str(several)}
    return named


def _is_quick(test: str) -> bool:
    """Tell whether it belongs to `make test-fast`: the units, and the contract in memory."""
    return test.startswith("tests/unit/") or (
        test.startswith("tests/contract/") and "locmem" in test
    )


# The interpreter waits for ever for a thread that some test left behind: rather show it, and fail.
# mutmut's process goes on after pytest, and its forked children would wait for the watching thread.
@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    if "MUTANT_UNDER_TEST" not in os.environ:
        faulthandler.dump_traceback_later(30, exit=True, file=sys.__stderr__ or sys.stderr)
