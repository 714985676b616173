"""``list_locks``, ``release_lock`` and force_release(): what operators see, and what they end."""

import builtins
import io
import json
import os
import re
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import time_machine
from django.core.management import CommandError, call_command

from django_distlock import InvalidLockBackend, force_release, lock
from django_distlock.backends.locmem import LocMemBackend
from django_distlock.conf import LONGEST
from django_distlock.engine.values import Held, LockState
from django_distlock.management.base import (
    INTERRUPTED,
    NO_SERVER,
    NOT_READ,
    WRONG_ARGUMENTS,
    LockCommand,
    duration,
    patience,
)
from django_distlock.management.commands.list_locks import Command as ListLocks
from django_distlock.management.commands.release_lock import NOT_HELD, Command as ReleaseLock
from tests.contract.crew import can_take, taken
from tests.fixtures import tenancy
from tests.fixtures.processes import Spawn

from .aliases import DOWN, DUMMY, MEMORY
from .lock_rows import HOLDER, put
from .terminal import Terminal, answer_at_a_terminal, printed

#: A lock of which nothing more is known.
BARE = Held("fees", "fees", None, None, None, "digest")


@pytest.fixture(autouse=True)
def aliases(settings: Any) -> None:
    settings.DISTLOCK = {"default": {}, "memory": MEMORY}


def listed(*arguments: str) -> list[list[str]]:
    lines = printed("list_locks", *arguments).splitlines()
    headings, *rows = [line.split("\t") for line in lines]
    assert headings == ["alias", "state", "name", "holder", "since", "remaining", "waiters"]
    return rows


def test_each_lock_of_each_alias_is_a_line(name: str) -> None:
    put("default", f"{name}:1", LockState.HELD)
    put("default", f"{name}:2", LockState.STALE)
    put("default", f"{name}:3", LockState.RESERVED)
    put("default", f"{name}:4", LockState.FREE)
    with lock(f"{name}:5", using="memory", shared=True, purpose="counting"):
        rows = sorted(listed(f"--name={name}:*"), key=lambda row: row[2])

    assert [row[:3] for row in rows] == [
        ["default", "held", f"{name}:1"],
        ["default", "stale", f"{name}:2"],
        ["default", "reserved", f"{name}:3"],
        ["memory", "held, shared", f"{name}:5"],
    ]
    assert rows[0][3] == str(HOLDER)
    assert re.fullmatch(r"(.* )?\d\d:\d\d:\d\d \([67]\d s ago\)", rows[0][4])
    assert rows[2][4] == "-"
    assert re.fullmatch(r"11[89] minutes", rows[0][5])
    assert re.fullmatch(r"ended [67]\d s ago", rows[1][5])
    assert re.fullmatch(r"11[89] minutes", rows[2][5])
    assert "(counting)" in rows[3][3]


@time_machine.travel("2026-03-04 12:00", tick=False)
@pytest.mark.parametrize(
    ("held", "cells"),
    [
        (BARE, ["held", "-", "-", "-", "-"]),
        (replace(BARE, holder=HOLDER, waiters=0), ["held", str(HOLDER), "-", "-", "0"]),
        (replace(BARE, shared=True, waiters=3), ["held, shared", "-", "-", "-", "3"]),
        (replace(BARE, key="fees~2", waiters=3), ["held, place 2", "-", "-", "-", "-"]),
        (
            replace(BARE, key="fees~0", holder=replace(HOLDER, limit=4)),
            ["held, place 0 of 4", str(HOLDER), "-", "-", "-"],
        ),
        (replace(BARE, age=5400.0), ["held", "-", "10:30 (90 minutes ago)", "-", "-"]),
        (replace(BARE, age=60.0), ["held", "-", "11:59:00 (60 s ago)", "-", "-"]),
        (replace(BARE, remaining=0.5), ["held", "-", "-", "0.5 s", "-"]),
        (replace(BARE, remaining=0.0), ["stale", "-", "-", "ended 0 s ago", "-"]),
        (replace(BARE, remaining=-90.0), ["stale", "-", "-", "ended 90 s ago", "-"]),
    ],
)
def test_each_fact_has_its_column(
    monkeypatch: pytest.MonkeyPatch, held: Held, cells: list[str]
) -> None:
    monkeypatch.setattr(LocMemBackend, "held", lambda self, key=None: [held])

    [[alias, state, shown, *rest]] = listed("--using=memory")
    assert (alias, shown) == ("memory", "fees")
    assert [state, *rest] == cells


def test_the_places_of_a_lock_are_listed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        replace(BARE, key=key, name=key[:4]) for key in ("fees~2", "rent", "fees~10", "fees~0")
    ]
    monkeypatch.setattr(LocMemBackend, "held", lambda self, key=None: found)

    rows = listed("--using=memory")

    places = ["held, place 0", "held, place 2", "held, place 10"]
    assert [row[1:3] for row in rows] == [*([each, "fees"] for each in places), ["held", "rent"]]


def test_state_and_alias_narrow_the_list(name: str) -> None:
    put("default", f"{name}:1", LockState.HELD)
    put("default", f"{name}:2", LockState.STALE)

    assert [row[2] for row in listed("--state=stale", f"--name={name}:*")] == [f"{name}:2"]
    assert listed("--using=memory", f"--name={name}:*") == []


def test_programs_get_an_object(name: str) -> None:
    put("default", name, LockState.HELD)

    report = json.loads(printed("list_locks", "--json", f"--name={name}"))

    [found] = report["locks"]
    assert found.pop("remaining") == pytest.approx(7140, abs=30)
    assert found.pop("age") == pytest.approx(60, abs=30)
    assert found.pop("fencing_token") > 0
    assert found.pop("holder")["host"] == HOLDER.host
    assert found.pop("waiters") in {0, None}
    assert found == {
        "alias": "default",
        "name": name,
        "key": name,
        "state": "held",
        "shared": False,
        "place": None,
        "limit": None,
    }
    assert report["failed"] == []


def test_an_alias_that_is_down_or_wrong_does_not_hide_the_others(settings: Any, name: str) -> None:
    settings.DISTLOCK = {"default": {}, "down": DOWN, "wrong": {"BACKEND": "redis"}, "dummy": DUMMY}
    put("default", name, LockState.HELD)
    out, err = io.StringIO(), io.StringIO()

    with pytest.raises(CommandError, match=r"^Not listed: down, wrong\.$") as failed:
        call_command("list_locks", f"--name={name}", stdout=out, stderr=err)

    assert failed.value.returncode == 1
    assert name in out.getvalue()
    assert "DISTLOCK['down']" in err.getvalue()
    assert "DISTLOCK['wrong']" in err.getvalue()
    assert "dummy" not in err.getvalue()


def test_an_unknown_alias_is_a_wrong_argument() -> None:
    text = r"^DISTLOCK has no alias 'nowhere'; it has default, memory\.$"
    with pytest.raises(CommandError, match=text) as refused:
        call_command("list_locks", "--using=nowhere")

    assert refused.value.returncode == WRONG_ARGUMENTS


def test_wrong_settings_are_no_traceback(settings: Any) -> None:
    settings.DISTLOCK = []

    with pytest.raises(CommandError, match="DISTLOCK"):
        call_command("list_locks")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between listings: none takes any time, and Ctrl-C comes in the third."""
    found: list[float] = []

    def pause(seconds: float) -> None:
        found.append(seconds)
        if len(found) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("django_distlock.management.commands.list_locks.time.sleep", pause)
    return found


@pytest.mark.parametrize(
    ("option", "seconds"), [("--watch", 2), ("--watch=5s", 5), ("--watch=0.1", 0.1)]
)
def test_it_is_shown_again_and_again_until_the_operator_has_seen_enough(
    pauses: list[float], name: str, option: str, seconds: float
) -> None:
    put("default", name, LockState.HELD)

    rows = listed(option, f"--name={name}")
    assert [row[2] for row in rows] == [name, "name", name, "name", name]
    assert pauses == [seconds] * 3


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("1.5s", 1.5),
        (" 15M ", 900),
        ("12h", 43_200),
        ("7d", 604_800),
        ("2w", 1_209_600),
        (f"{LONGEST:.0f}", LONGEST),
    ],
)
def test_a_time_can_be_written_in_units(text: str, seconds: float) -> None:
    assert duration(text) == patience(text) == seconds
    assert patience(" Forever ") is None


def test_a_lock_is_released_and_its_holder_is_told(name: str) -> None:
    lease = taken(name)

    with lock(f"{name}:other") as other:
        shown, told = printed("release_lock", name, "--yes").splitlines()
        assert other.held

    assert re.fullmatch(re.escape(f"{name}: held by {lease.holder}, ") + r"\d+ s left", shown)
    assert told == "Released: 1"
    assert lease.lost
    assert not lock(name).locked()


def test_a_lock_that_nobody_holds_has_a_code_of_its_own(name: str) -> None:
    out = io.StringIO()

    with pytest.raises(SystemExit) as ended:
        call_command("release_lock", name, "--yes", stdout=out)
    with pytest.raises(SystemExit) as silent:
        call_command("release_lock", name, "--yes", verbosity=0)

    assert ended.value.code == silent.value.code == NOT_HELD
    assert out.getvalue() == f"Nobody holds '{name}'.\n"


def test_a_lock_that_is_held_on_another_alias_is_told(name: str) -> None:
    out = io.StringIO()

    with lock(name, using="memory") as lease:
        with pytest.raises(SystemExit):
            call_command("release_lock", name, "--yes", stdout=out)
        assert lease.held

    assert out.getvalue().splitlines() == [
        f"Nobody holds '{name}'.",
        "It is held on the alias memory: add --using memory.",
    ]


@pytest.mark.parametrize(
    ("answer", "is_released"), [("y", True), ("n", False), ("", False), ("\x04", False)]
)
def test_it_asks_before(spawn: Spawn, name: str, answer: str, is_released: bool) -> None:
    lease = taken(name)

    child = spawn(f"{__name__}:release_at_a_terminal", name=name, answer=answer)

    assert child.wait() == (0 if is_released else NOT_HELD)
    assert "Release it? [y/N]" in child.stderr
    assert "Traceback" not in child.stderr
    assert lock(name, reentrant=False).locked() is not is_released
    lease.give_back_later()


def test_commands_end_with_codes_of_shells(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def ctrl_c(prompt: object = "", /) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(builtins, "input", ctrl_c)

    with lock(name, using="memory"), pytest.raises(SystemExit) as interrupted:
        ReleaseLock().run_from_argv(["manage.py", "release_lock", name, "--using=memory"])

    assert interrupted.value.code == INTERRUPTED


def pipe_without_reader() -> int:
    """Return the end for writing of a pipe whose other end is closed."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    return write_end


@pytest.mark.parametrize("using", ["memory", "down"])
def test_a_command_whose_reader_has_gone_ends_as_in_a_shell(
    monkeypatch: pytest.MonkeyPatch, settings: Any, using: str
) -> None:
    settings.DISTLOCK = {"memory": MEMORY, "down": DOWN}

    with os.fdopen(pipe_without_reader(), "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit) as not_read:
            ListLocks().run_from_argv(["manage.py", "list_locks", f"--using={using}"])

    assert not_read.value.code == NOT_READ


def test_a_command_of_which_nobody_reads_the_errors_ends_as_in_a_shell(
    monkeypatch: pytest.MonkeyPatch, settings: Any, tmp_path: Path
) -> None:
    settings.DISTLOCK = {"down": DOWN}

    with (
        (tmp_path / "stdout").open("w") as out,
        suppress(BrokenPipeError),
        os.fdopen(pipe_without_reader(), "w", buffering=1) as pipe,
    ):
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", pipe)
        with pytest.raises(SystemExit) as not_read:
            ListLocks().run_from_argv(["manage.py", "list_locks"])

    assert not_read.value.code == NOT_READ


def test_a_broken_pipe_of_the_work_is_raised() -> None:
    class Work(LockCommand):
        def handle(self, *args: Any, **options: Any) -> None:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        Work().run_from_argv(["manage.py", "migrate_locked"])


def release_at_a_terminal(name: str, answer: str) -> None:
    answer_at_a_terminal(answer)
    call_command("release_lock", name)


@pytest.mark.parametrize("options", [["--json"], []], ids=["for a program", "without stdin"])
def test_it_does_not_ask_where_nobody_answers(
    monkeypatch: pytest.MonkeyPatch, name: str, options: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # Python's value if it was closed, as by <&-

    with pytest.raises(CommandError, match=r"^Nobody can be asked here: add --yes\.$") as refused:
        call_command("release_lock", name, *options)

    assert refused.value.returncode == WRONG_ARGUMENTS


def test_errors_have_codes_of_their_own(settings: Any, name: str) -> None:
    settings.DISTLOCK = {"default": DOWN, "dummy": DUMMY}

    for arguments, code in (
        (["release_lock", name, "--yes"], NO_SERVER),
        (["release_lock", name, "--yes", "--using=dummy"], WRONG_ARGUMENTS),
        (["run_locked", name, "true"], NO_SERVER),
    ):
        with pytest.raises(CommandError) as refused:
            call_command(*arguments)
        assert refused.value.returncode == code


def test_in_code_all_holdings_of_a_name_are_ended(name: str) -> None:
    other = taken(f"{name}:other", using="memory")
    with lock(name, using="memory", min_hold=60):
        pass

    assert force_release(name, using="memory") == 1
    other.release()
    assert force_release(name, using="memory") == 0
    assert can_take("memory", name)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["list_locks"], 1),
        (["check_locks"], 1),
        (["release_lock", "x", "--yes"], WRONG_ARGUMENTS),
        (["run_locked", "x", "--", "true"], WRONG_ARGUMENTS),
        (["reset_fences", "testproject.Account", "--yes"], WRONG_ARGUMENTS),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_function_that_finds_no_tenant_is_no_traceback(
    command: list[str], code: int, settings: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    settings.DISTLOCK = {"default": {**MEMORY, "KEY_PREFIX": tenancy.NO_TENANT}}

    with pytest.raises(CommandError) as refused:
        call_command(*command)

    assert refused.value.returncode == code
    said = f"{refused.value} {capsys.readouterr().err}"
    assert "DISTLOCK['default']: KEY_PREFIX, or" in said
    assert "failed: LookupError('no tenant'). Run this for a tenant, or let" in said
    with pytest.raises(InvalidLockBackend, match=r"^DISTLOCK\['default'\]: KEY_PREFIX, or"):
        force_release("x")


def test_a_stale_row_from_before_the_lock_had_a_limit_hides_none_of_its_places(name: str) -> None:
    put("default", name, LockState.STALE)
    leases = [lock(name, limit=2, reentrant=False).acquire(timeout=0) for _ in range(2)]

    assert force_release(name) == 3
    assert not any(lease and lease.held for lease in leases)


def test_aliases_that_need_no_key_are_left_out_where_there_is_no_tenant(settings: Any) -> None:
    settings.DISTLOCK = {"default": MEMORY, "dummy": {**DUMMY, "KEY_PREFIX": tenancy.NO_TENANT}}

    call_command("list_locks")
    call_command("reset_fences", "testproject.Account", "--yes")


def test_rows_are_purged_where_there_is_no_tenant(settings: Any) -> None:
    settings.DISTLOCK = {"default": {"KEY_PREFIX": tenancy.NO_TENANT}}

    call_command("purge_stale_locks")
