"""Every test of the contract runs over each profile that declares what the test needs."""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from django_distlock import locks, operators
from django_distlock.conf import read_alias, read_settings
from django_distlock.engine.registry import registry
from tests.fixtures import tenancy
from tests.fixtures.eventually import eventually
from tests.fixtures.processes import Child, Spawn

from .faults import Faulty, faulty_version_of
from .profiles import PROFILES, Profile
from .rivals import Children, Rival, Rivals

if TYPE_CHECKING:
    from pytest_django.fixtures import Settings

    from django_distlock.backends.base import BaseLockBackend

#: The alias that the tests use, and others of the same settings: other servers of one application.
ALIAS = "contract"
SITES = 12
#: The names of the profiles to run; all, if there are none.
CHOSEN = os.environ.get("DISTLOCK_PROFILES", "").split()
_numbers = itertools.count(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*traits): runs over profiles that declare them all")
    config.addinivalue_line(
        "markers", "lacks(*traits): runs over profiles that declare none of them"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "profile" in metafunc.fixturenames:
        marked = metafunc.definition.iter_markers
        needed = {trait for mark in marked("needs") for trait in mark.args}
        lacked = {trait for mark in marked("lacks") for trait in mark.args}
        chapter = metafunc.definition.path.stem.removeprefix("test_")
        suitable = [
            profile
            for profile in PROFILES
            if needed <= profile.traits and not lacked & profile.traits
            if not profile.chapters or chapter in profile.chapters
            if not CHOSEN or profile.name in CHOSEN
        ]
        metafunc.parametrize("profile", [_parameter(profile) for profile in suitable])


def _parameter(profile: Profile) -> Any:
    marks = [*profile.marks, *([pytest.mark.server] if profile.needs_server else [])]
    return pytest.param(profile, id=profile.name, marks=marks)


@pytest.fixture(autouse=True)
def leases_are_looked_at_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has this process see within 0.05 s, not within a second, whose owners have ended."""
    monkeypatch.setattr("django_distlock.engine.registry.SWEEP", 0.05)


@pytest.fixture
def using(profile: Profile, request: pytest.FixtureRequest, settings: Settings) -> Iterator[str]:
    """The alias under test. Afterwards nothing may be left that this process holds or waits for."""
    for fixture in profile.fixtures:
        request.getfixturevalue(fixture)
    ttl = max(5 * profile.tick, profile.shortest_ttl)
    brief = {"TTL": ttl, "TIMEOUT": 3 * profile.tick}
    settings.DISTLOCK = {
        ALIAS: profile.settings,
        "brief": {**profile.settings, **brief},
        "prefixed": {**profile.settings, "KEY_PREFIX": "other"},
        "alike": {**profile.settings, "KEY_PREFIX": "other2"},
        "tenants": {**profile.settings, "KEY_PREFIX": tenancy.PREFIX},
        **{f"site{number}": profile.settings for number in range(SITES)},
    }
    _forget_leases()  # of tests that failed elsewhere
    yield ALIAS
    try:
        eventually(_all_have_ended, 15, "all leases of the test have ended")
    finally:
        _forget_leases()
        operators.forget_late(settings.DISTLOCK)
        locks.close()


#: False in a free-threaded Python.
is_gil_enabled: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)


def _all_have_ended() -> bool:
    if not is_gil_enabled():
        gc.collect()  # some objects go by the collector alone there, which comes seldom
    return not registry.leases()


def _forget_leases() -> None:
    # One test that fails must not make the others fail.
    registry.release_all()
    registry._known.clear()


@pytest.fixture
def backend(using: str, request: pytest.FixtureRequest) -> BaseLockBackend:
    """The backend under test; the faulty one where a test asks for that too."""
    if "faulty" in request.fixturenames:
        request.getfixturevalue("faulty")
    return locks[using]


@pytest.fixture
def sites(using: str, profile: Profile) -> list[str]:
    """Aliases by which as many servers of one application meet the same locks."""
    if "cross_process" not in profile.traits:
        return [using] * SITES
    return [f"site{number}" for number in range(SITES)]


@pytest.fixture
def tick(profile: Profile) -> float:
    """The unit of time, in seconds."""
    return profile.tick


@pytest.fixture
def name() -> str:
    """A name that no other test has locked."""
    return f"contract:{os.getpid()}:{next(_numbers)}"


@pytest.fixture
def rival(backend: BaseLockBackend, name: str) -> Iterator[Rivals]:
    """Makes rivals for the lock of the test (or another *of*), from a *site*; what they hold is given back."""
    rivals: list[Rival] = []

    def make(of: str = name, *, site: str = "", **wishes: Any) -> Rival:
        rivals.append(Rival.of(locks[site] if site else backend, of, **wishes))
        return rivals[-1]

    yield make
    if isinstance(backend, Faulty):
        backend.heal()  # a fault that has not come by now is not theirs
    for each in rivals:
        each.leaves()


@pytest.fixture
def holder(rival: Rivals) -> Rival:
    """A rival that has the lock of the test."""
    holder = rival(ttl=60)
    holder.takes()
    return holder


@pytest.fixture
def faulty(using: str) -> Iterator[Faulty]:
    """The backend under test, with verbs that can be watched and broken."""
    backend = faulty_version_of(locks[using], read_alias(using, read_settings()[using]))
    locks.replace(using, backend)
    yield backend
    backend.heal()


@pytest.fixture
def child(using: str, settings: Settings, spawn: Spawn) -> Children:
    """Start another process that runs one of acts.py with the aliases of the test."""

    def start(act: str, **arguments: Any) -> Child:
        aliases = {using: settings.DISTLOCK[using]}
        return spawn(f"tests.contract.acts:{act}", aliases=aliases, **arguments)

    return start


@pytest.fixture(params=[False, True])
def shared(backend: BaseLockBackend, request: pytest.FixtureRequest) -> bool:
    """Whether to read, where there are readers."""
    if request.param and not backend.supports_shared:
        pytest.skip("it has no readers")
    return bool(request.param)
