"""The index of the tests leads from each promise to tests that there are."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
NAMED = set(re.findall(r"`(\w+/test_\w+\.py)`", (TESTS / "README.md").read_text()))


def test_each_file_it_names_is_there() -> None:
    assert [name for name in sorted(NAMED) if not (TESTS / name).is_file()] == []


def test_it_names_the_whole_contract() -> None:
    contract = {f"contract/{path.name}" for path in (TESTS / "contract").glob("test_*.py")}

    assert sorted(contract - NAMED) == []
