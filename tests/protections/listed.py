"""The protections that stand in the *.toml files of this folder, and how one is taken out."""

from __future__ import annotations

import shutil
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LIBRARY = "django_distlock"


@dataclass(frozen=True)
class Protection:
    """The texts to replace, in whichever files they are, and the tests that must notice."""

    promise: str
    kind: str
    name: str
    edits: list[tuple[str, str]]
    red: list[str]

    @property
    def title(self) -> str:
        """What people call it: no other one has the same."""
        return f"{self.promise}, {self.kind}: {self.name}"

    def tree_without(self, folder: Path) -> Path:
        """Copy the code to *folder*, without this protection."""
        tree = folder / "tree"
        for name in (LIBRARY, "tests", "testproject"):
            shutil.copytree(ROOT / name, tree / name)
        shutil.copy(ROOT / "pyproject.toml", tree)
        for old, new in self.edits:
            (path,) = places(old, tree)
            path.write_text(path.read_text().replace(old, new))
        return tree


def places(text: str, tree: Path = ROOT) -> list[Path]:
    """Return the files of the library that have *text*, each as often as it has it."""
    sources = {path: path.read_text() for path in (tree / LIBRARY).rglob("*.py")}
    return [path for path, source in sources.items() for _ in range(source.count(text))]


@cache
def protections() -> list[Protection]:
    """Return all of them; the file that one stands in is named after its promise."""
    return [
        Protection(path.stem, **entry)
        for path in sorted(Path(__file__).parent.glob("*.toml"))
        for entry in tomllib.loads(path.read_text())["protection"]
    ]
