"""Children do what tests of several processes rely on."""

import signal
import subprocess
import time

import pytest
from django.conf import settings

from tests.fixtures.child import hear, hear_word, say
from tests.fixtures.eventually import eventually, never
from tests.fixtures.launch import state
from tests.fixtures.processes import Child, Spawn, run_to_its_death

HERE = "tests.unit.test_processes"


def converse(greeting: str) -> str:
    print("printed, not said")  # noqa: T201 - to be seen in the child's errors only
    say("greeted", text=greeting, database=settings.DATABASES["default"]["NAME"])
    hear_word("go")
    return hear()


def tick() -> None:
    while True:
        say("tick")
        time.sleep(0.01)


def fail() -> None:
    raise ValueError("as planned")


def parent() -> None:
    child = subprocess.Popen(["sleep", "60"])
    say("started", pid=child.pid)
    child.wait()


def test_child_talks_with_its_parent_and_returns_a_value(spawn: Spawn) -> None:
    child = spawn(f"{HERE}:converse", greeting="hé")

    greeted = child.expect("greeted")
    child.tell("go")
    child.tell("on")

    name = settings.DATABASES["default"]["NAME"]
    assert greeted == {"event": "greeted", "text": "hé", "database": str(name)}
    assert child.result() == "on"
    assert "printed, not said" in child.stderr


def test_failing_child_shows_its_errors(spawn: Spawn) -> None:
    child = spawn(f"{HERE}:fail")

    with pytest.raises(AssertionError, match=r"(?s)ended without saying 'held'.*as planned"):
        child.expect("held")
    assert child.wait() == 1


def test_silent_child_fails_at_the_deadline(spawn: Spawn) -> None:
    child = spawn(f"{HERE}:converse", greeting="x")

    with pytest.raises(AssertionError, match="did not say 'held' in time"):
        child.expect("held", seconds=0.1)
    with pytest.raises(AssertionError, match="still runs after"):
        child.wait(seconds=0.1)


def test_stopped_child_stands_still_until_continued(spawn: Spawn) -> None:
    child = spawn(f"{HERE}:tick")
    child.expect("tick")

    child.stop()
    assert state(child.pid) == "T"
    eventually(lambda: _stands_still(child))

    child.cont()
    child.expect("tick")


def _stands_still(child: Child) -> bool:
    child.drain()
    never(lambda: False, 0.1)
    return not child.drain()


def test_killed_child_takes_its_own_children_along(spawn: Spawn) -> None:
    child = spawn(f"{HERE}:parent")
    grandchild = child.expect("started")["pid"]

    child.kill()

    assert child.wait() == -signal.SIGKILL
    assert state(grandchild) in "XZ"


def test_children_die_with_the_run() -> None:
    code = (
        "import os, signal;"
        "from tests.fixtures.processes import Child;"
        f"child = Child('{HERE}:tick', environment={{}});"
        "child.expect('tick');"
        "print(child.pid, flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )

    pid = int(run_to_its_death(code))

    eventually(lambda: state(pid) in "XZ")
