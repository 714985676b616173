"""What is released: a wheel and an sdist with all that belongs there, and its texts in each language."""

from __future__ import annotations

import gettext
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path
from typing import Any

import pytest
from django.test import RequestFactory
from django.utils.translation import override

from django_distlock import LockNotAcquired, __version__, respond
from django_distlock.exceptions import DOCS
from django_distlock.management.commands.release_lock import Command as ReleaseLock
from tests.fixtures.pages import PAGES, ROOT

from .staff import client_of

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCALE = Path("django_distlock/locale")
LANGUAGES = "de", "es", "fr", "ja", "zh_Hans"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and an sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(run, cwd=ROOT, check=True, capture_output=True)
    return folder


def shipped() -> set[str]:
    """Return the files of the package."""
    found = (ROOT / "django_distlock").rglob("*")
    return {
        str(path.relative_to(ROOT))
        for path in found
        if path.is_file() and path.parent.name != "__pycache__"
    }


def test_the_wheel_has_the_package_and_nothing_else(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}

    assert names == shipped()
    assert {f"{LOCALE}/{each}/LC_MESSAGES/django.mo" for each in LANGUAGES} <= names
    assert "django_distlock/py.typed" in names


def test_the_sdist_has_what_the_docs_and_the_tests_need_too(built: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}

    needed = {str(page.relative_to(ROOT)) for page in PAGES}
    needed |= {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")}
    needed |= {"CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "LICENSE", "Makefile"}
    needed |= {"SECURITY.md", "PKG-INFO", "pyproject.toml", "tools/lint", "docs/conf.py"}
    assert shipped() | needed <= names
    others = {name.partition("/")[0] for name in names - needed} - {".gitignore"}
    assert others == {
        *("benchmarks", "django_distlock", "docs", "model", "testproject", "tests", "tools"),
        *("compose.yaml", "tox.ini"),
    }
    assert [name for name in names if "_build" in name or name.endswith((".pyc", ".sqlite3"))] == []


def test_the_package_index_shows_what_it_is_and_where_to_read_on(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("METADATA")]
        metadata = message_from_string(archive.read(name).decode())

    assert metadata["Description-Content-Type"] == "text/markdown"
    assert f"Documentation, {DOCS}" in metadata.get_all("Project-URL", [])
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata.get_all("Provides-Extra") == sorted(PROJECT["optional-dependencies"])


# Translations.


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package, whose texts were collected as `make messages` does."""
    folder = tmp_path_factory.mktemp("texts")
    package = folder / "django_distlock"
    shutil.copytree(ROOT / "django_distlock", package)
    make = [sys.executable, "-m", "django", "makemessages", "--all", "--no-obsolete"]
    format_ = ["--no-location", "--no-wrap"]
    # The settings are found from there too where this package is not installed as editable.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    made = subprocess.run(
        [*make, *format_], cwd=package, env=environment, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_text_is_translated(collected: Path, tmp_path: Path, language: str) -> None:
    ours = ROOT / LOCALE / language / "LC_MESSAGES"
    texts = collected / LOCALE / language / "LC_MESSAGES/django.po"

    compiled = tmp_path / "django.mo"
    # It also compares the placeholders, and counts the plural forms.
    check = ["msgfmt", "--check", "--statistics", f"--output-file={compiled}", str(texts)]
    done = subprocess.run(check, check=True, capture_output=True, text=True)

    assert texts.read_text() == (ours / "django.po").read_text(), (
        "run `make messages`, and translate what is new"
    )
    assert re.fullmatch(r"\d+ translated messages\.\n", done.stderr), done.stderr
    known = _catalog(compiled)
    assert known == _catalog(ours / "django.mo")
    assert known["Release it? [y/N] "].endswith("[y/N] ")  # the answers that are understood


def _catalog(path: Path) -> dict[Any, str]:
    with path.open("rb") as file:
        known: dict[Any, str] = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]  # there is no other way to go over all
    return known


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("de", ["Verteilte Sperren", "gehalten und abgelaufen", "Inhaber"]),
        ("es", ["Bloqueos distribuidos", "ocupados y caducados", "Titular"]),
        ("fr", ["Verrous distribués", "détenus et expirés", "Détenteur"]),
        ("ja", ["分散ロック", "保持中と失効", "保持者"]),
        ("zh-hans", ["分布式锁", "持有和失效", "持有者"]),
    ],
)
def test_people_are_told_in_their_language(language: str, words: list[str]) -> None:
    # No superuser of pytest-django: the hash of a password takes half a second.
    browser = client_of("view_methodlock", "force_release_methodlock")
    with override(language):
        page = browser.get("/admin/django_distlock/heldlock/").content.decode()
        refusal = respond()(LockNotAcquired("a"), RequestFactory().get("/")).content.decode()
        said = ReleaseLock().create_parser("", "").format_help()

    assert [word for word in words if word not in page] == []
    assert "Somebody else" not in refusal
    assert "Take a lock away" not in said
