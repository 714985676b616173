"""The lists of protections keep up with the code and its tests: see `make see-red`."""

from __future__ import annotations

import re
from functools import cache

from tests.protections.listed import ROOT, places, protections


def test_each_edit_is_of_a_text_that_stands_once() -> None:
    texts = {old for one in protections() for old, _ in one.edits}

    assert [text for text in texts if len(places(text)) != 1] == list[str]()


def test_each_is_guarded_by_tests_that_there_are() -> None:
    assert [one.title for one in protections() if not one.red] == []
    missing = {test for one in protections() for test in one.red if not _stands(test)}
    assert missing == set()


def _stands(test: str) -> bool:
    file, *_, name = test.split("::")
    function = re.escape(name.partition("[")[0])
    return bool(re.search(rf"def {function}\(", _text(file)))


@cache
def _text(file: str) -> str:
    path = ROOT / file
    return path.read_text() if path.exists() else ""
