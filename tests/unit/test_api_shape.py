"""The shape of the public API: its names, twins for async code, and a word on each."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import iscoroutinefunction

import django_distlock
from django_distlock import Lease, Lock, backends, distributed_lock, lock, lock_all
from django_distlock.backends import BaseLockBackend
from django_distlock.backends.locmem import LocMemBackend
from django_distlock.engine import acquisition
from django_distlock.lock import LockTerms, Terms
from django_distlock.lock_set import LockSet
from testproject import directory
from tests.fixtures.pages import DOCS


def test_every_public_name_is_there_and_says_what_it_is() -> None:
    names = django_distlock.__all__
    assert [name for name in names if not inspect.getdoc(getattr(django_distlock, name))] == []


@pytest.mark.parametrize(
    ("kind", "verbs"),
    [
        (Lock, ["acquire", "release", "locked", "holder"]),
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
    for public in (lock, lock_all, Lock, distributed_lock):
        parameters = inspect.signature(public).parameters.values()
        terms = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        for of_the_decorator in ("name", "on_busy"):
            terms.pop(of_the_decorator, None)
        assert "**" not in str(inspect.signature(public))
        assert list(terms) == list(LockTerms.__annotations__), public
        of_alias = {word: f"{terms.pop(word)}" for word in ("timeout", "ttl")}
        assert of_alias == {"timeout": "<TIMEOUT of the alias>", "ttl": "<TTL of the alias>"}
        assert terms == {word: getattr(Terms(), word) for word in terms}


@pytest.mark.parametrize("kind", [Lock, LockSet, Lease, BaseLockBackend])
def test_every_public_method_is_documented(kind: type) -> None:
    public = {n: m for n, m in vars(kind).items() if not n.startswith("_") and callable(m)}

    bare = {name for name, method in public.items() if not inspect.getdoc(method)}
    # The class says what these do: the same as the others, awaited.
    twins = {name for name in bare if name.startswith("a") and name[1:] in public}
    assert bare - twins == set()
    assert not twins or "with an *a* in front" in (inspect.getdoc(kind) or "")


def test_dir_shows_of_a_lease_what_its_page_describes(memory: LocMemBackend) -> None:
    section = (
        (DOCS / "reference/api.md").read_text().split("autoclass:: Lease()")[1].split("\n##")[0]
    )
    described = re.findall(r"   \.\. (?:auto\w+|attribute):: (\w+)", section)

    with lock("a") as lease:
        assert [name for name in dir(lease) if not name.startswith("_")] == sorted(described)


def _parameters(method: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]


def test_importing_it_loads_no_backend() -> None:
    """A project with Redis alone pays for no module of a database, nor for Celery; transaction_lock() imports its own."""
    code = """
import sys
from django.conf import settings
settings.configure(INSTALLED_APPS=["django_distlock"])
import django; django.setup()
import django_distlock
def loaded(): return sorted(name for name in sys.modules if name.startswith("django_distlock.backends."))
print(loaded() == ["django_distlock.backends.base"] or loaded())
print(len([name for name in sys.modules if name.startswith("django_distlock")]) < 45)
django_distlock.Holder.current()
print("celery" not in sys.modules)
django_distlock.transaction_lock
print("django_distlock.backends.rowlock" in loaded())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert run.stdout.split() == ["True"] * 4, run.stdout


def test_the_example_of_a_backend_imports_from_the_door_alone() -> None:
    tree = ast.parse(Path(inspect.getfile(directory)).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}

    ours = {module for module in modules if module and module.startswith("django_distlock")}
    assert ours == {"django_distlock.backends"}
    assert all(name in dir(backends) for name in backends.__all__)


@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, names in django_distlock._ELSEWHERE.items() for name in names],
)
def test_a_name_that_is_elsewhere_is_an_error_that_says_where(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(f"django_distlock.{module}"), name)

    with pytest.raises(ImportError, match=rf"from django_distlock\.{module} import {name}\b"):
        exec(f"from django_distlock import {name}")


def test_any_other_name_is_an_attribute_error() -> None:
    assert not hasattr(django_distlock, "unique_tusk")
