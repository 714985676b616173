"""How long something was on its way, told by the clocks of one machine or of two."""

from __future__ import annotations

import pytest

from django_distlock.engine import clock


@pytest.mark.parametrize(
    ("boot", "wall", "lease", "told"),
    [
        ("here", 100, 100, 100),
        ("here", -3600, 100, 100),  # the wall clock was set back meanwhile
        ("here", 5000, 100, 5000),  # or ahead: rather more than less
        ("elsewhere", 100, -9000, 100),
        ("elsewhere", -3, 0, 0),  # the other machine's clock is ahead of ours
        ("", 100, 9000, 100),  # no machine tells its boots apart
    ],
)
def test_the_way_of_a_text(
    monkeypatch: pytest.MonkeyPatch, boot: str, wall: float, lease: float, told: float
) -> None:
    monkeypatch.setattr(clock, "_BOOT", "here" if boot else "")
    wall_then, _, lease_then = clock.postmark()

    assert clock.travelled(wall_then - wall, boot, lease_then - lease) == pytest.approx(told, abs=5)


def test_a_text_is_never_on_its_way_for_less_than_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_gettime", lambda clock_id: 1_000.0)
    monkeypatch.setattr(clock, "lease_time", lambda: 1_000.0)

    assert clock.travelled(1_003.0, "elsewhere", 0.0) == 0
    assert clock.travelled(999.75, "elsewhere", 0.0) == 0.25
