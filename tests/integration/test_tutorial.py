"""The tutorial, done as it is written: in a new project, with real commands and real shells."""

from __future__ import annotations

import doctest
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

TUTORIAL = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"
_BLOCK = re.compile(
    r"^(?::::\{code-block\} (?P<kind>\w+)\n:caption: (?P<caption>.+)\n\n(?P<body>[\s\S]*?):::"
    r"|```console\n(?P<commands>[\s\S]*?)```"
    r"|% test: (?P<mark>\w+))$",
    re.MULTILINE,
)
#: Gives the account its 100.00 back.
RESTORE = 'python manage.py shell -c "from bank.models import Account; Account.objects.update(balance=100)"'
#: Reads examples as lines of JSON, does them, and writes what they print or how they fail.
_SHELL = """
import contextlib, io, json, sys, traceback
import django
django.setup()
known = {"__name__": "__main__"}
answers = sys.stdout
for line in sys.stdin:
    printed, failure = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(json.loads(line), "<shell>", "single"), known)
        except BaseException as error:
            failure = "".join(traceback.format_exception_only(error))
    print(json.dumps([printed.getvalue(), failure]), file=answers, flush=True)
"""


class Block(NamedTuple):
    """A fenced block of the page: a file, a session in a named shell, or commands."""

    kind: str
    caption: str
    body: str


class Shell:
    """A `manage.py shell` that stays open."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SHELL],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def type(self, source: str) -> tuple[str, str | None]:
        """Return what *source* prints, and the last lines of its traceback."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(source) + "\n")
        self._process.stdin.flush()
        printed, failure = json.loads(self._process.stdout.readline())
        return printed, failure

    def close(self) -> None:
        self._process.communicate(timeout=10)


class Student:
    """Writes the files, runs the commands and types what the tutorial says."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shells: dict[str, Shell] = {}
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("COVERAGE", "DISTLOCK"))
        }
        self._environment |= {
            "DJANGO_SETTINGS_MODULE": "shop.settings",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(folder),
        }
        self.printed: dict[str, str] = {}
        self._mark = ""

    def do(self, block: Block) -> None:
        if block.kind == "mark":
            self._mark = block.body
        elif block.kind == "console":
            self._run(block.body)
        elif block.kind == "pycon":
            self._type(block)
        else:
            self._write(block)

    def close(self) -> None:
        for shell in self._shells.values():
            shell.close()

    def _write(self, block: Block) -> None:
        is_more = block.caption.startswith("at the end of ")
        path = self._folder / block.caption.removeprefix("at the end of ")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if is_more else "w") as file:
            file.write(block.body)

    def _run(self, text: str) -> None:
        expected = "".join(line + "\n" for line in text.splitlines() if not line.startswith("$ "))
        printed = ""
        for command in re.findall(r"^\$ (.*)$", text, re.MULTILINE):
            if "pip install" not in command:
                printed = self._shell_out(command)
        if expected:
            assert printed == expected
        if self._mark == "lost":
            printed = self._lose(text, printed)
        if self._mark:
            self.printed[self._mark] = printed
            self._mark = ""

    def _lose(self, text: str, printed: str) -> str:
        """Try again if one process was over before the other began."""
        for _ in range(3):
            if last_number(printed) != 60:
                break
            self._shell_out(RESTORE)
            printed = self._shell_out(text.strip().removeprefix("$ "))
        return printed

    def _shell_out(self, command: str) -> str:
        ran = subprocess.run(
            ["bash", "-c", command],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, f"{command}\n{ran.stdout}{ran.stderr}"
        return ran.stdout

    def _type(self, block: Block) -> None:
        if block.caption not in self._shells:
            self._shells[block.caption] = Shell(self._folder, self._environment)
        shell, checker = self._shells[block.caption], doctest.OutputChecker()
        for example in doctest.DocTestParser().get_examples(block.body):
            printed, failure = shell.type(example.source)
            got, want = (printed, example.want) if failure is None else (failure, example.exc_msg)
            is_right = want is not None and checker.check_output(
                _patient(want), got, doctest.ELLIPSIS
            )
            assert is_right, f"{block.caption}: {example.source}expected {want!r}, got {got!r}"


def _patient(want: str) -> str:
    """Let a busy machine wait longer than it should."""
    return want.replace("gave up after 0.5... s", "gave up after ... s")


def blocks() -> Iterator[Block]:
    for found in _BLOCK.finditer(TUTORIAL.read_text()):
        if found["mark"]:
            yield Block("mark", "", found["mark"])
        elif found["commands"]:
            yield Block("console", "", found["commands"])
        else:
            yield Block(found["kind"], found["caption"], found["body"])


def last_number(printed: str) -> float:
    return float(printed.rsplit(maxsplit=1)[-1])


@pytest.fixture
def student(tmp_path: Path) -> Iterator[Student]:
    student = Student(tmp_path)
    yield student
    student.close()


@pytest.mark.timeout(180)
def test_the_tutorial_works_as_it_is_written(student: Student) -> None:
    for block in blocks():
        student.do(block)

    assert 60 < last_number(student.printed["lost"]) < 100
    assert last_number(student.printed["exact"]) == 60


def test_no_block_of_the_tutorial_is_left_out() -> None:
    fences = re.findall(r"^(?:```\w+|:::\{code-block\}.*)$", TUTORIAL.read_text(), re.MULTILINE)

    assert len([block for block in blocks() if block.kind != "mark"]) == len(fences)
