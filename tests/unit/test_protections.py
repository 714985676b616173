"""The lists of protections keep up with the code and its tests: see `make see-red`."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

from tests.protections.listed import ROOT, Edit, protections


def test_each_edit_is_of_a_text_that_stands_once() -> None:
    edits = {edit for one in protections() for edit in one.edits}

    assert [edit for edit in edits if _text(edit.file).count(edit.old) != 1] == list[Edit]()


def test_each_is_guarded_by_tests_that_there_are() -> None:
    named = {one.title: one.tests for one in protections()}

    assert [name for name, tests in named.items() if not tests] == []
    missing = {test for tests in named.values() for test in tests if not _stands(test)}
    assert missing == set()


def test_there_are_few_for_each_promise_and_kind_of_backend() -> None:
    """Each pins a text of the code: what is pure arithmetic is for mutmut (`make mutants`)."""
    rooms = Counter((one.promise, one.kind) for one in protections())

    assert sum(rooms.values()) <= 150
    assert {room: count for room, count in rooms.items() if count > 4} == {}


def test_each_has_a_name_of_its_own() -> None:
    titles = [one.title for one in protections()]

    assert len(set(titles)) == len(titles)


def _stands(test: str) -> bool:
    file, *_, name = test.split("::")
    function = re.escape(name.partition("[")[0])
    return bool(re.search(rf"def {function}\(", _text(file)))


@cache
def _text(file: str) -> str:
    path = ROOT / file
    return path.read_text() if path.exists() else ""
