"""What is released: a wheel and an sdist with all that belongs there, and its texts in German."""

from __future__ import annotations

import gettext
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
from django.test import Client
from django.utils.translation import override

from django_distlock.checks import DOCS
from tests.fixtures.pages import DOCS as PAGES, ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GERMAN = Path("locale/de/LC_MESSAGES")


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
    assert f"django_distlock/{GERMAN}/django.mo" in names
    assert "django_distlock/py.typed" in names


def test_the_sdist_can_be_built_from(built: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    others = {"CHANGELOG.md", "LICENSE", "README.md", "SECURITY.md", "pyproject.toml", "PKG-INFO"}
    assert names - {".gitignore"} == shipped() | others


def test_the_package_index_shows_what_it_is_and_where_to_read_on(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("METADATA")]
        metadata = message_from_string(archive.read(name).decode())

    assert metadata["Description-Content-Type"] == "text/markdown"
    assert f"Documentation, {DOCS}" in metadata.get_all("Project-URL", [])
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata.get_all("Provides-Extra") == sorted(PROJECT["optional-dependencies"])


def test_links_of_the_long_description_are_absolute_and_lead_to_pages() -> None:
    links = re.findall(r"\]\((\S+?)\)", (ROOT / "README.md").read_text())

    assert links
    for link in links:
        assert link.startswith("https://"), f"{link} leads nowhere on the package index"
        page = link.removeprefix(DOCS).partition("#")[0]
        file = PAGES / page if "_static" in page else (PAGES / page).with_suffix(".md")
        assert not link.startswith(DOCS) or file.exists(), link


def test_hints_of_checks_and_the_index_have_the_same_address() -> None:
    page = (PAGES / "reference" / "checks.md").read_text()

    assert PROJECT["urls"]["Documentation"] == DOCS
    assert [
        f"distlock-{number.lower()}"
        for number in re.findall(r"^## `distlock\.(.+)`", page, re.MULTILINE)
    ] == (re.findall(r"^\((.+)\)=$", page, re.MULTILINE))


def test_every_extra_is_of_use() -> None:
    """What an extra installs is imported, by us or, for a driver of a database, by Django."""
    sources = "".join(path.read_text() for path in (ROOT / "django_distlock").rglob("*.py"))
    extras = {*PROJECT["optional-dependencies"]} - {"all", "demo"}
    of_django = {"postgres", "mysql", "mysqlclient", "memcached"}

    modules = {"zookeeper": "kazoo"}
    for extra in extras - of_django:
        assert re.search(rf"(import|from) {modules.get(extra, extra)}\b", sources), extra


# Translations.


def test_every_text_is_translated(tmp_path: Path) -> None:
    package = tmp_path / "django_distlock"
    shutil.copytree(ROOT / "django_distlock", package)
    texts = package / GERMAN / "django.po"

    make = [sys.executable, "-m", "django", "makemessages", "--locale=de", "--no-obsolete"]
    format_ = ["--no-location", "--no-wrap"]
    made = subprocess.run(
        [*make, *format_], cwd=package, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    compiled = tmp_path / "django.mo"
    check = ["msgfmt", "--check", "--statistics", f"--output-file={compiled}", str(texts)]
    done = subprocess.run(check, check=True, capture_output=True, text=True)

    assert texts.read_text() == (ROOT / "django_distlock" / GERMAN / "django.po").read_text(), (
        "run `make messages`, and translate what is new"
    )
    assert re.fullmatch(r"\d+ translated messages\.\n", done.stderr), done.stderr
    assert _catalog(compiled) == _catalog(ROOT / "django_distlock" / GERMAN / "django.mo")


def _catalog(path: Path) -> dict[Any, str]:
    with path.open("rb") as file:
        known: dict[Any, str] = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]  # there is no other way to go over all
    return known


def test_the_admin_speaks_german(admin_client: Client) -> None:
    with override("de"):
        page = admin_client.get("/admin/django_distlock/methodlock/").content.decode()

    for text in ("Verteilte Sperren", "Sperre zum Ansehen", "Zustand", "abgelaufen"):
        assert text in page
