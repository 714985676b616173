"""``reset_fences``: rows whose fence is ahead of all tokens can be claimed again."""

from __future__ import annotations

import json
import time
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import override_settings

from django_distlock import StaleFencingToken, lock, lock_all
from django_distlock.management.base import BUSY, NO_SERVER, WRONG_ARGUMENTS
from django_distlock.management.commands.reset_fences import NOT_AGREED
from django_distlock.models import Lowered
from testproject.models import Account

from .aliases import DOWN, MEMORY
from .terminal import answer_at_a_terminal, printed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fixtures.processes import Spawn


@pytest.fixture(autouse=True)
def aliases(settings: Any) -> None:
    settings.DISTLOCK = {"default": MEMORY}


@pytest.fixture
def ahead() -> Iterator[Account]:
    """A row whose fence comes from a server whose clock is a day ahead."""
    Account.objects.update(fence=Lowered(0))  # of rows that other tests have left
    fence = (time.time_ns() // 1000) + 86_400_000_000
    made = Account.objects.create(name=uuid.uuid4().hex, balance=1, opening_balance=1, fence=fence)
    yield made
    Account.objects.filter(pk=made.pk).delete()


def test_rows_that_refused_every_claim_can_be_claimed_again(ahead: Account) -> None:
    with lock("fee") as lease, pytest.raises(StaleFencingToken, match="ahead of ours by 2"):
        lease.claim(ahead)

    assert printed("reset_fences", "testproject.Account", "--yes") == "Reset: 1\n"

    with lock("fee") as lease:
        assert lease.claim(ahead).fence == lease.fencing_token


def test_it_waits_until_nobody_holds_a_lock(ahead: Account) -> None:
    for names, said in (
        (["fee"], "1 lock is held, such as 'fee'"),
        (["fee", "tax"], "2 locks are held, such as '"),
    ):
        with lock_all(*names), pytest.raises(CommandError, match=f"^{said}") as refused:
            call_command("reset_fences", "testproject.Account", "--yes")
        assert refused.value.returncode == BUSY

    assert Account.objects.get(pk=ahead.pk).fence == ahead.fence


def test_it_needs_every_server_that_gives_tokens(settings: Any, ahead: Account) -> None:
    settings.DISTLOCK = {"default": MEMORY, "down": DOWN}

    with pytest.raises(CommandError) as refused:
        call_command("reset_fences", "testproject.Account", "--yes")

    assert refused.value.returncode == NO_SERVER


def test_an_alias_that_cannot_list_its_locks_is_named(
    settings: Any, ahead: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    blind = {**DOWN, "OPTIONS": {**DOWN["OPTIONS"], "scripting": False}}
    settings.DISTLOCK = {"default": MEMORY, "blind": blind}

    assert printed("reset_fences", "testproject.Account", "--yes") == "Reset: 1\n"

    assert "cannot tell whether a lock is held: blind." in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", NOT_AGREED)])
def test_it_asks_and_says_what_it_risks(
    spawn: Spawn, ahead: Account, answer: str, code: int
) -> None:
    child = spawn(f"{__name__}:reset_at_a_terminal", answer=answer)

    assert child.wait() == code
    assert "A holder that was paused before this can then claim" in child.stderr
    assert "Set 1 fences of testproject.Account to 0? [y/N]" in child.stderr
    assert (Account.objects.get(pk=ahead.pk).fence == 0) is (answer == "y")


def reset_at_a_terminal(answer: str) -> None:
    answer_at_a_terminal(answer)
    with override_settings(DISTLOCK={"default": MEMORY}):
        call_command("reset_fences", "testproject.Account")


def test_programs_get_an_object_and_v0_nothing(ahead: Account) -> None:
    command = ["reset_fences", "testproject.Account", "--yes"]

    assert json.loads(printed(*command, "--json")) == {"reset": 1}
    assert printed(*command, verbosity=0) == ""


def test_a_database_that_is_down_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    down = {"ENGINE": "django.db.backends.postgresql", "NAME": "x", "HOST": "127.0.0.1", "PORT": 1}
    databases = connections.configure_settings({"default": {}, "down": down})
    monkeypatch.setitem(connections.settings, "down", databases["down"])

    with pytest.raises(CommandError, match=r"^DATABASES\['down'\]: connection") as refused:
        call_command("reset_fences", "testproject.Account", "--yes", "--database=down")

    assert refused.value.returncode == NO_SERVER
    assert "\n" not in str(refused.value)
    del connections["down"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["testproject.Account"], "add --yes"),
        (["testproject.Fee", "--yes"], "is not a FencedModel"),
        (["testproject.Nothing", "--yes"], "There is no model"),
        (["Account", "--yes"], "There is no model"),
    ],
)
def test_wrong_arguments_have_a_code_of_their_own(arguments: list[str], text: str) -> None:
    with pytest.raises(CommandError, match=text) as refused:
        call_command("reset_fences", *arguments)

    assert refused.value.returncode == WRONG_ARGUMENTS
