"""The protections that stand in the *.toml files of this folder, and how one is taken out."""

from __future__ import annotations

import shutil
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
NEEDED = ("django_distlock", "tests", "testproject", "pyproject.toml")


@dataclass(frozen=True)
class Edit:
    """A text that stands once in a file, and what is there instead without the protection."""

    file: str
    old: str
    new: str

    def make(self, tree: Path) -> None:
        """Make the edit in a copy of the code."""
        path = tree / self.file
        text = path.read_text()
        assert text.count(self.old) == 1, f"{self.file} has not once: {self.old}"
        path.write_text(text.replace(self.old, self.new))


@dataclass(frozen=True)
class Protection:
    """What is taken out, and the tests, as pytest names them, that must notice."""

    promise: str
    kind: str
    name: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]

    @property
    def title(self) -> str:
        """What people call it: no other one has the same."""
        return f"{self.promise}, {self.kind}: {self.name}"

    def tree_without(self, folder: Path) -> Path:
        """Copy the code to *folder*, without this protection."""
        tree = folder / "tree"
        tree.mkdir()
        for name in NEEDED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, tree / name)
        for edit in self.edits:
            edit.make(tree)
        return tree


@cache
def protections() -> list[Protection]:
    """Return all of them; the file that one stands in is named after its promise."""
    return [
        _protection(path.stem, entry)
        for path in sorted(Path(__file__).parent.glob("*.toml"))
        for entry in tomllib.loads(path.read_text())["protection"]
    ]


def _protection(promise: str, entry: dict[str, Any]) -> Protection:
    edits = tuple(Edit(**edit) for edit in entry["edit"])
    tests = tuple(f"{file}::{test}" for file, tests in entry["red"].items() for test in tests)
    return Protection(promise, entry["kind"], entry["name"], edits, tests)
