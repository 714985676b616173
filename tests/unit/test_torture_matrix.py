"""Each row of the fault matrix is met by the torture, or by tests that there are."""

from __future__ import annotations

import re

from tests.fixtures.pages import ROOT
from tests.torture.matrix import IN_TRANSACTION, MET, is_test, rows

TORTURE = ROOT / "tests" / "torture"
NAMED = [*IN_TRANSACTION, *(each for met in MET.values() for each in met)]


def test_each_row_of_the_guarantees_is_met() -> None:
    assert sorted(rows()) == sorted(MET)


def test_the_faults_that_meet_them_are_faults_of_the_nemesis() -> None:
    source = "".join((TORTURE / name).read_text() for name in ("nemesis.py", "arenas.py"))

    assert [each for each in NAMED if not is_test(each) and f'"{each}"' not in source] == []


def test_the_tests_that_meet_them_exist() -> None:
    assert [each for each in NAMED if is_test(each) and not _stands(each)] == []


def _stands(test: str) -> bool:
    file, _, name = test.partition("::")
    return bool(re.search(rf"def {name}\(", (ROOT / file).read_text()))
