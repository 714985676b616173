"""A command that SIGTERM ends: its lock stays until the ttl, or comes free as the guide on cron says."""

import re
import signal
import threading
from typing import Any

import pytest

from django_distlock import lock
from tests.fixtures.child import say
from tests.fixtures.pages import DOCS, section
from tests.fixtures.processes import Spawn

ADVICE = section(DOCS / "howto" / "cron.md", "## When the command is stopped")


def hold(name: str, *, is_advised: bool) -> None:
    if is_advised:
        [recipe] = re.findall(r"```python\n(.*?)```", ADVICE, re.DOTALL)
        known: dict[str, Any] = {}
        exec(recipe, known)
        known["release_on_sigterm"]()
    with lock(name):
        say("held")
        threading.Event().wait()


@pytest.mark.parametrize("is_advised", [True, False], ids=["advised", "plain"])
def test_a_command_that_turns_sigterm_into_an_exception_releases_its_lock(
    spawn: Spawn, name: str, is_advised: bool
) -> None:
    child = spawn(f"{__name__}:hold", name=name, is_advised=is_advised)
    child.expect("held")

    child.terminate()

    assert child.wait() == (128 + signal.SIGTERM if is_advised else -signal.SIGTERM)
    assert lock(name).locked() is not is_advised
