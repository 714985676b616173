"""call_command(): each command takes as keyword arguments what it takes in a shell."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from django_distlock import lock

from .aliases import DUMMY, MEMORY
from .terminal import printed


@pytest.fixture(autouse=True)
def aliases(settings: Any) -> None:
    settings.DISTLOCK = {"default": {}, "memory": MEMORY, "dummy": DUMMY}


def answer(command: str, *arguments: str, **options: Any) -> dict[str, Any]:
    """Return the JSON that *command* prints."""
    found: dict[str, Any] = json.loads(printed(command, *arguments, **options, json=True))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"older_than": "60"},
        {"older_than": "1.5h"},
        {"older_than": 60},
        {"older_than": timedelta(days=1)},
        {"batch_size": "10", "dry_run": True},
        {"using": "default"},
        {"using": ["default"]},
    ],
    ids=str,
)
def test_purge_stale_locks(options: dict[str, Any]) -> None:
    assert [each["alias"] for each in answer("purge_stale_locks", **options)["purged"]] == [
        "default"
    ]


def test_list_locks() -> None:
    with lock("listed", using="memory"):
        options = {"using": "memory", "state": "held", "verbosity": "0"}
        [found] = answer("list_locks", **options)["locks"]

    assert found["name"] == "listed"


def test_run_locked() -> None:
    options = {"timeout": "forever", "ttl": "1m", "max_hold": timedelta(hours=1), "limit": "2"}
    options |= {"grace": 1, "min_hold": "0", "using": "memory"}

    with pytest.raises(SystemExit, match="3"):
        call_command("run_locked", "called", "sh", "-c", "exit 3", **options)


@pytest.mark.parametrize(
    ("command", "arguments", "options", "text"),
    [
        ("purge_stale_locks", [], {"older_than": "soon"}, "argument --older-than: 'soon' is not"),
        ("purge_stale_locks", [], {"batch_size": "x"}, "argument --batch-size: invalid int value"),
        ("list_locks", [], {"state": "lost"}, "argument --state: invalid choice: 'lost'"),
        ("list_locks", [], {"watch": "0"}, "argument --watch: '0' is too short"),
        ("run_locked", ["x", "true"], {"ttl": "-1"}, "argument --ttl: '-1' is not a time"),
        ("reset_fences", ["testproject.Account"], {"database": "x"}, "--database: invalid choice"),
    ],
)
def test_wrong_values_are_told_as_in_a_shell(
    command: str, arguments: list[str], options: dict[str, Any], text: str
) -> None:
    [(name, value)] = options.items()
    with pytest.raises(CommandError, match=text) as refused:
        call_command(command, *arguments, **options)
    with pytest.raises(CommandError) as in_a_shell:
        call_command(command, f"--{name.replace('_', '-')}={value}", *arguments)

    assert str(refused.value) == str(in_a_shell.value)
