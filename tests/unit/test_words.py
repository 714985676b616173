"""The words of the code: each class has a name of its own, and docstrings begin with plain ones."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import django_distlock
import testproject

LIBRARY = Path(django_distlock.__file__).parent
EXAMPLE = Path(testproject.__file__).parent
FREE_TO_REPEAT = {
    "Command": "Django finds a management command by this name",
    "Meta": "Django finds the options of a model by this name",
    "UniqueTask": "a base class for tasks, of Celery and of Django: a project uses one of them",
}
#: First words of a docstring that make a riddle of it: a verb or a noun says more.
RIDDLES = {
    *("everybody", "have", "let", "nobody", "nothing", "somebody", "someone", "tell"),
    *("that", "these", "those", "what", "whatever", "who", "whoever", "whom", "whose"),
}
Named = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _walk(folder: Path) -> Iterator[tuple[str, ast.AST]]:
    """Yield what the source files in *folder* are made of, each with where it is."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            yield f"{path.relative_to(folder)}:{getattr(node, 'lineno', 1)}", node


def test_no_two_classes_have_the_same_name() -> None:
    places = defaultdict[str, list[str]](list)
    for place, node in _walk(LIBRARY):
        if isinstance(node, ast.ClassDef):
            places[node.name.lstrip("_")].append(place)

    twice = {name: found for name, found in places.items() if len(found) > 1}

    assert {name: found for name, found in twice.items() if name not in FREE_TO_REPEAT} == {}
    assert twice.keys() == FREE_TO_REPEAT.keys()


@pytest.mark.parametrize("folder", [LIBRARY, EXAMPLE], ids=lambda folder: folder.name)
def test_a_docstring_begins_with_a_plain_word(folder: Path) -> None:
    riddles = [
        f"{place}: {text.splitlines()[0]}"
        for place, node in _walk(folder)
        if isinstance(node, Named)
        and (text := ast.get_docstring(node))
        and text.split()[0].strip(".,:;").lower() in RIDDLES
    ]

    assert riddles == []
