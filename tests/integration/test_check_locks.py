"""``manage.py check_locks``: how it tells what does not work. That all works is tested on every backend."""

import io
import json
import re
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from django_distlock import lock
from django_distlock.backends.locmem import LocMemBackend
from django_distlock.models import MethodLock

from .aliases import DOWN, DUMMY, MEMORY
from .terminal import printed


def failure(*arguments: str) -> tuple[str, str]:
    """Return the lines of a check that fails, and what it says of it."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.raises(CommandError, match=r"^Not in order: [a-z, ]+\.$") as failed:
        call_command("check_locks", *arguments, stdout=out, stderr=err)
    assert failed.value.returncode == 1
    return out.getvalue(), err.getvalue()


def test_each_alias_is_a_line(settings: Any) -> None:
    settings.DISTLOCK = {"default": {}, "memory": MEMORY}

    headings, *rows = [line.split("\t") for line in printed("check_locks").splitlines()]

    assert headings == ["alias", "acquire", "contend", "extend", "list", "release", "notes"]
    assert [row[0] for row in rows] == ["default", "memory"]
    assert [row[-1] for row in rows] == ["no shared", "-"]
    assert all(re.fullmatch(r"\d+\.\d\d ms", cell) for row in rows for cell in row[1:-1])
    assert [len(row) for row in rows] == [7, 7]


def test_programs_get_an_object_with_the_aliases_that_they_name(settings: Any) -> None:
    settings.DISTLOCK = {"default": {}, "memory": MEMORY}

    report = json.loads(printed("check_locks", "--json", "--using=memory"))

    spent = report["aliases"][0].pop("milliseconds")
    assert report == {"aliases": [{"alias": "memory", "cannot": []}]}
    assert [*spent] == ["acquire", "contend", "extend", "list", "release"]


def test_each_check_uses_the_same_row(settings: Any) -> None:
    settings.DISTLOCK = {"default": {}}
    rows = []
    for _ in range(2):
        printed("check_locks")
        rows.append(MethodLock.objects.count())

    assert rows[0] == rows[1]


def test_what_is_down_or_wrong_does_not_stop_the_others(settings: Any) -> None:
    settings.DISTLOCK = {"default": {}, "down": DOWN, "wrong": {"BACKEND": "redis"}}

    lines, problems = failure()

    assert [line.split("\t")[1:3] for line in lines.splitlines()][2:] == [["-", "-"], ["-", "-"]]
    assert "down: acquire: DISTLOCK['down']" in problems
    assert "wrong: DISTLOCK['wrong']" in problems
    assert "default" not in problems


def test_an_alias_that_excludes_nobody_is_not_in_order(settings: Any) -> None:
    settings.DISTLOCK = {"default": DUMMY}

    lines, problems = failure()

    assert "contend: a second holder got the lock too" in problems
    row = re.sub(r"\d+\.\d\d ms", "…", lines.splitlines()[1])
    assert row.split("\t") == ["default", "…", *"----", "no fencing, no fair, no listing"]


def test_a_lock_that_the_list_has_not_is_told(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.DISTLOCK = {"default": MEMORY}
    real = LocMemBackend.held
    monkeypatch.setattr(LocMemBackend, "held", lambda self, key=None: () if key else real(self))

    with lock("another"):
        assert "list: the lock is held, and the list does not have it" in failure()[1]
