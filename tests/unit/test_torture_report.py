"""The page that a torture run writes."""

from __future__ import annotations

from collections import Counter

from tests.torture.checker import Finding, Verdict
from tests.torture.report import page
from tests.torture.run import Result


def a_result(name: str, *findings: Finding) -> Result:
    verdict = Verdict(
        [*findings],
        grants=1234,
        outcomes=Counter(got=1234, refused=7, failed=8),
        faults=Counter({"server hangs": 2}),
        allowed_pairs=3,
        refused_writes=4,
        written=Counter(claimed=500, unfenced=600),
        lost=Counter(unfenced=5),
    )
    return Result(name, 60.0, 42, "2026-01-02", [f"Server of {name} 1.0"], verdict)


def test_it_tells_what_was_run_and_that_nothing_was_found() -> None:
    text = page([a_result("redis"), a_result("etcd")], [])

    assert "## The run of 2026-01-02\n" in text
    assert "Seed 42, 2 minutes in all: 2,468 grants and 4 faults." in text
    assert "Server of etcd 1.0; Server of redis 1.0." in text
    assert "| redis | 60 | 1,234 | 7 | 8 | 2 | 3 | 4 | 0 of 500 | 5 of 600 | 0 |" in text
    assert "| server hangs | 4 | all |" in text
    assert "No promise was broken." in text
    assert "Control" not in text


def test_it_tells_of_broken_promises_and_of_controls() -> None:
    broken = a_result("redis", Finding("exclusion", "'a' had two holders\nfor long"))
    control = a_result("no-lock", Finding("exclusion", "x"), Finding("exclusion", "y"))

    text = page([broken, a_result("etcd")], [control])

    assert "- redis: exclusion: 'a' had two holders\n" in text
    assert "| no-lock | 1,234 | exclusion 2 | 5 of 600 |" in text
