"""The panel of django-debug-toolbar: real requests through its middleware."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.fixtures.warm import ROOT


def test_it_lists_the_locks_of_a_request() -> None:
    command = [sys.executable, "-m", "tests.integration.toolbar_site"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    told, of_async_view = map(json.loads, run.stdout.splitlines())

    assert [(row["name"], row["using"], row["state"]) for row in told["rows"]] == [
        ("fee:7", "default", "released"),
        ("<b>", "default", "busy"),
        ("lost", "default", "lost"),
    ]
    released, busy, lost = told["rows"]
    assert released["requests"] == lost["requests"] == 1
    assert busy["requests"] == 0  # this process holds it
    assert all(time.endswith(" ms") for time in released["times"])
    assert "pid" in busy["about"]
    assert "operator" in lost["about"]
    assert told["subtitle"].startswith("3 locks in ")
    assert "&lt;b&gt;" in told["page"]
    assert "<b>" not in told["page"]

    assert [row["state"] for row in of_async_view["rows"]] == ["released"]
    assert of_async_view["subtitle"].startswith("1 lock in ")
    assert f'<td title="fee:{"7" * 200}"><code>fee:{"7" * 55}…</code>' in of_async_view["page"]
