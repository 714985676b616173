"""The model for Spin: the functions that its actions stand for exist, and the page has all its variations."""

from __future__ import annotations

import pkgutil
import re

import pytest

from model.check import MODEL, PROMISES, VARIATIONS
from tests.fixtures.pages import DOCS, section

NAMED = [
    name
    for comment in re.findall(r"/\* = (.*?) \*/", MODEL.read_text())
    for name in comment.split()
]


def test_each_action_names_functions() -> None:
    assert len(NAMED) > 20
    assert {name.partition(".")[0] for name in NAMED} == {"django_distlock"}


@pytest.mark.parametrize("name", sorted(set(NAMED)))
def test_a_function_that_the_model_stands_for_exists(name: str) -> None:
    assert pkgutil.resolve_name(name)


def test_the_macros_of_the_variations_are_those_of_the_model() -> None:
    given = {each.partition("=")[0] for found in VARIATIONS for each in found.macros.split()}

    asked = set(re.findall(r"(?:#ifn?def |defined\()(\w+)", MODEL.read_text()))

    assert given | set(PROMISES) == asked


def test_the_page_has_a_row_for_each_variation() -> None:
    rows = section(DOCS / "explanation" / "model.md", "## What it has found").splitlines()

    found = [row.split(" | ")[:2] for row in rows if row.startswith("| ")][1:]

    assert found == [[f"| {each.name}", each.promised] for each in VARIATIONS]
