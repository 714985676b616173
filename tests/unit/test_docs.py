"""README and documentation: every example runs."""

from __future__ import annotations

from doctest import ELLIPSIS
from typing import TYPE_CHECKING, Any

import pytest
from django.core.management import call_command
from django.db import connections
from django.dispatch import Signal
from django.test.utils import isolate_apps
from sybil.document import Document
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.myst import CodeBlockParser, PythonCodeBlockParser

from django_distlock import locks, signals
from django_distlock.engine.registry import registry
from django_distlock.models import MethodLock
from tests.fixtures.pages import PAGES, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pytest_django import Settings
    from sybil.example import Example

SIGNALS = [signal for signal in vars(signals).values() if isinstance(signal, Signal)]
#: A block that begins with this line is what the reader writes there.
SETTINGS = "# settings.py"
#: The tutorial is a project of its own: tests/integration/test_tutorial.py follows it.
EXAMPLES = [page for page in PAGES if page.name != "tutorial.md"]


class ShellParser(PythonCodeBlockParser):
    """Finds the examples that are sessions with an interpreter."""

    def __init__(self) -> None:
        super().__init__(doctest_optionflags=ELLIPSIS)
        self.codeblock_parser = CodeBlockParser("pycon", PythonEvaluator())


class Reader:
    """Does what a page says: settings go into the settings, the rest is run."""

    def __init__(self, settings: Settings, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._settings = settings
        self._monkeypatch = monkeypatch
        self._folder = folder

    def follow(self, page: Path) -> None:
        document = Document.parse(str(page), PythonCodeBlockParser(), ShellParser())
        # Models of the examples belong to an app, but to none that is installed.
        document.namespace["__name__"] = "testproject.docs"
        with isolate_apps("testproject"):
            for example in document.examples():
                self._do(example)

    def _do(self, example: Example) -> None:
        if isinstance(example.parsed, str) and example.parsed.startswith(SETTINGS):
            self._configure(example.parsed)
        else:
            example.evaluate()

    def _configure(self, source: str) -> None:
        known: dict[str, Any] = {
            "INSTALLED_APPS": [],
            "BASE_DIR": self._folder,
            "DATABASES": {},
            "CACHES": {},
            "DISTLOCK": {},
        }
        exec(source, known)
        for alias, database in connections.configure_settings(
            {"default": {}, **known["DATABASES"]}
        ).items():
            if alias != "default":
                self._monkeypatch.setitem(connections.settings, alias, database)
                call_command("migrate", "django_distlock", database=alias, verbosity=0)
        if known["CACHES"]:
            self._settings.CACHES = known["CACHES"]
        self._settings.DISTLOCK = known["DISTLOCK"] or {"default": {}}
        if not source.startswith(f"{SETTINGS}: wrong"):
            assert [message for alias in locks for message in locks[alias].check()] == []


@pytest.fixture
def reader(settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Reader]:
    # Pages use the same names: each begins with no locks, and with nobody listening.
    MethodLock.objects.all().delete()
    heard = {signal: signal.receivers[:] for signal in SIGNALS}
    yield Reader(settings, monkeypatch, tmp_path)
    for signal, receivers in heard.items():
        signal.receivers[:] = receivers
        signal.sender_receivers_cache.clear()
    registry.release_all()
    locks.close()
    for alias in set(connections) - {"default", "postgres", "mariadb"}:
        connections[alias].close()
        del connections[alias]


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_example_of_a_page_runs(page: Path, reader: Reader) -> None:
    reader.follow(page)
