"""The lists of protections and of mutants keep up with the code and its tests: see `make see-red` and `make mutants`."""

from __future__ import annotations

import re
import tomllib
from functools import cache

from tests.protections.listed import ROOT, places, protections


def test_each_edit_is_of_a_text_that_stands_once() -> None:
    texts = {old for one in protections() for old, _ in one.edits}

    assert [text for text in texts if len(places(text)) != 1] == list[str]()


def test_each_is_guarded_by_tests_that_there_are() -> None:
    assert [one.title for one in protections() if not one.red] == []
    missing = {test for one in protections() for test in one.red if not _stands(test)}
    assert missing == set()


def test_mutants_are_made_of_files_and_tried_by_tests_that_there_are() -> None:
    mutmut = tomllib.loads(_text("pyproject.toml"))["tool"]["mutmut"]
    selection = [
        each.partition("=")[2] or each for each in mutmut["pytest_add_cli_args_test_selection"]
    ]
    named = [*mutmut["only_mutate"], *(each for each in selection if each.startswith("tests/"))]

    assert [each for each in named if not list(ROOT.glob(each.partition("::")[0]))] == []
    assert [each for each in named if "::" in each and not _stands(each)] == []


def _stands(test: str) -> bool:
    file, *_, name = test.split("::")
    function = re.escape(name.partition("[")[0])
    return bool(re.search(rf"def {function}\(", _text(file)))


@cache
def _text(file: str) -> str:
    path = ROOT / file
    return path.read_text() if path.exists() else ""
