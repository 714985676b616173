"""The shape of the public API: its names, twins for async code, and a word on each."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from asgiref.sync import iscoroutinefunction

import django_distlock
from django_distlock import (
    Lease,
    Lock,
    lock,
    lock_all,
)
from django_distlock.backends.base import BaseLockBackend
from django_distlock.engine import acquisition
from django_distlock.lock import LockSet


def test_the_public_names_are_these() -> None:
    assert (
        sorted(django_distlock.__all__)
        == django_distlock.__all__
        == [
            "InvalidLockBackend",
            "Lease",
            "Lock",
            "LockBackendError",
            "LockDeadlock",
            "LockError",
            "LockLost",
            "LockNotAcquired",
            "LockNotHeld",
            "LockNotOwned",
            "LockOutcomeUnknown",
            "NotSupported",
            "ReleasedBeforeCommit",
            "SnapshotBeforeLock",
            "StaleFencingToken",
            "current_lease",
            "distributed_lock",
            "force_release",
            "lock",
            "lock_all",
            "locks",
            "respond",
            "retry",
            "skip",
            "transaction_lock",
        ]
    )


@pytest.mark.parametrize("name", django_distlock.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    assert inspect.getdoc(getattr(django_distlock, name))


@pytest.mark.parametrize(
    ("kind", "verbs"),
    [
        (Lock, ["acquire", "release", "locked"]),
        (LockSet, ["acquire", "release"]),
        (Lease, ["release", "extend", "detach", "attach"]),
        (acquisition, ["acquire"]),
        (BaseLockBackend, ["try_acquire", "release", "extend", "probe", "enqueue"]),
    ],
)
def test_every_verb_has_an_async_twin_of_the_same_signature(kind: Any, verbs: list[str]) -> None:
    for verb in verbs:
        sync, twin = getattr(kind, verb), getattr(kind, f"a{verb}")
        assert iscoroutinefunction(twin), verb
        assert not iscoroutinefunction(sync), verb
        assert _parameters(sync) == _parameters(twin), verb


@pytest.mark.parametrize("kind", [Lock, LockSet, Lease])
def test_everything_that_is_entered_is_entered_by_async_with_too(kind: type) -> None:
    for verb in ("enter", "exit"):
        assert hasattr(kind, f"__{verb}__")
        assert hasattr(kind, f"__a{verb}__")


def test_what_takes_terms_takes_the_same_ones() -> None:
    for public in (lock, lock_all, Lock):
        terms = [
            p for p in inspect.signature(public).parameters.values() if p.kind is p.VAR_KEYWORD
        ]
        assert [str(p.annotation) for p in terms] == ["Unpack[LockTerms]"]


@pytest.mark.parametrize("kind", [Lock, LockSet, Lease, BaseLockBackend])
def test_every_public_method_is_documented(kind: type) -> None:
    public = {n: m for n, m in vars(kind).items() if not n.startswith("_") and callable(m)}

    bare = {name for name, method in public.items() if not inspect.getdoc(method)}
    # The class says what these do: the same as the others, awaited.
    twins = {name for name in bare if name.startswith("a") and name[1:] in public}
    assert bare - twins == set()
    assert not twins or "begin with" in (inspect.getdoc(kind) or "")


def _parameters(method: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]
