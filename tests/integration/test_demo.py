"""`make demo` and `make demo-server`, small: their commands as processes of their own."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import pytest

from testproject.fees import after
from tests.fixtures.environment import free_port, is_listening
from tests.fixtures.eventually import eventually
from tests.fixtures.launch import launch

ROOT = Path(__file__).parents[2]
SMALL = ("demo", "--servers=3", "--charges=4", "--work=0.05")
SHOULD_BE = after(12, Decimal("100000.00"))

Environment = dict[str, str]


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return {**os.environ, "DISTLOCK_SQLITE_PATH": str(tmp_path / "demo.sqlite3"), "COLUMNS": "80"}


@dataclass
class Row:
    """What the demo's table tells of one run."""

    made: int
    lost: int
    balance: Decimal
    should_be: Decimal
    wrong: Decimal


def row(title: str, output: str) -> Row:
    line = re.search(rf"^\| {title} +\|(.*)\|$", output, re.MULTILINE)
    assert line, output
    made, lost, *money = (cell.strip().replace(",", "") for cell in line[1].split("|"))
    return Row(int(made), int(lost), *map(Decimal, money))


def test_the_demo_loses_updates_without_the_lock_and_none_with_it(environment: Environment) -> None:
    command = [sys.executable, "-m", "testproject", *SMALL]
    shown = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=50, check=False
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    unlocked, locked = row("no lock", shown.stdout), row("@distributed_lock", shown.stdout)
    assert unlocked.made == 12
    assert unlocked.lost > 0
    assert unlocked.wrong == unlocked.balance - SHOULD_BE > 0
    assert locked == Row(12, 0, SHOULD_BE, SHOULD_BE, Decimal(0))


# The server of the demo.


@pytest.fixture
def server(environment: Environment, tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A demo server, whose port stands in *environment*; it ends with the test."""
    environment["PORT"] = port = str(free_port())
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-m", "testproject", "serve", "--port", port]
        process = launch(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    eventually(lambda: process.poll() is not None or is_listening(int(port)), seconds=60)
    assert process.poll() is None, (tmp_path / "log").read_text()
    yield process
    process.kill()
    process.wait()


def lock_states(environment: Environment) -> dict[str, str]:
    query = """
        SELECT description, CASE
        WHEN owner IS NULL AND available_at > strftime('%Y-%m-%d %H:%M:%f', 'now') THEN 'reserved'
        WHEN owner IS NULL THEN 'free' WHEN expires_at < strftime('%Y-%m-%d %H:%M:%f', 'now') THEN 'stale' ELSE 'held' END
        FROM django_distlock_methodlock
    """
    with closing(sqlite3.connect(environment["DISTLOCK_SQLITE_PATH"])) as connection:
        return dict(connection.execute(query))


def page(environment: Environment, path: str) -> str:
    url = f"http://127.0.0.1:{environment['PORT']}{path}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
        return text


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_it_has_accounts_and_locks_to_show_and_its_holder_goes_with_it_however_it_ends(
    environment: Environment, server: "subprocess.Popen[str]", end: signal.Signals
) -> None:
    index = page(environment, "/")
    expected = {
        "newsletter": "free",
        "reminders:daily": "reserved",
        "import:orders": "stale",
        "report:monthly": "held",
    }
    assert all(f">{name}</a>" in index for name in ("Ada", "Grace", "Linus"))
    eventually(lambda: lock_states(environment) == expected)

    server.send_signal(end)
    server.wait(10)

    eventually(lambda: lock_states(environment)["report:monthly"] == "free")
