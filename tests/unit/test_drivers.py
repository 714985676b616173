"""The driver of PostgreSQL, where its import is not complete."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

import pytest

from django_distlock.backends.database import postgresql

ANY = "django.db.backends.postgresql.psycopg_any"


def imported_again() -> Any:
    spec = spec_from_file_location(postgresql.__name__, postgresql.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_import_that_was_interrupted_is_no_missing_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", ModuleType("psycopg"))
    monkeypatch.setitem(sys.modules, ANY, ModuleType(ANY))  # its names are still to come

    with pytest.raises(ImportError):
        imported_again()


def test_it_can_be_imported_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules]:
        if name.partition(".")[0] in {"psycopg", "psycopg2"}:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, ANY, ModuleType(ANY))

    assert imported_again().HAS_PSYCOPG3 is False
