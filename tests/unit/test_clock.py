"""How long something was on its way, told by the clocks of one machine or of two; and times as people read them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.utils import timezone, translation
from django.utils.translation import ngettext

from django_distlock.ground import clock


@pytest.mark.parametrize(
    ("boot", "wall", "lease", "told"),
    [
        ("here", 100, 100, 100),
        ("here", -3600, 100, 100),  # the wall clock was set back meanwhile
        ("here", 5000, 100, 5000),  # or ahead: rather more than less
        ("here", -3600, -100, 0),  # both were, as in another time namespace
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
    # Not lease_time(), too: the clock thread of an earlier test may be about to look at it.
    monkeypatch.setattr(clock, "_wall_time", lambda: 1_000.0)

    assert clock.travelled(1_003.0, "elsewhere", 0.0) == 0
    assert clock.travelled(999.75, "elsewhere", 0.0) == 0.25


@pytest.mark.parametrize("ttl", [0.1, 3600])
def test_clocks_of_two_machines_differ_by_a_hundredth_and_2_milliseconds(ttl: float) -> None:
    assert clock.drift(ttl) == pytest.approx(ttl * 0.01 + 0.002)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0, "0 s"),
        (0.05, "0.05 s"),
        (0.316, "0.32 s"),
        (9.97, "10 s"),
        (29.98, "29 s"),
        (119, "119 s"),
        (120, "2 minutes"),
        (7200, "2 hours"),
        (48 * 3600, "2 days"),
        (1e9, "11574 days"),
    ],
)
def test_a_length_of_time_in_words(seconds: float, told: str) -> None:
    assert clock.in_words(seconds) == told


def test_only_the_admin_translates_it() -> None:
    with translation.override("de"):
        assert clock.in_words(2660, ngettext) == "44 Minuten"
        assert clock.in_words(2660) == "44 minutes"


def test_a_time_of_day_is_in_the_zone_of_django_and_has_the_date_of_another_day() -> None:
    noon = datetime.now(UTC).replace(hour=12, minute=5, second=30)
    if abs(datetime.now(UTC) - noon) < timedelta(minutes=5):
        noon = noon.replace(hour=9)
    far = datetime(2031, 5, 4, 22, 5, 30, tzinfo=UTC)

    with timezone.override(UTC):
        assert clock.time_of_day(noon) == f"{noon:%H:%M}"
    with timezone.override("Asia/Kathmandu"):
        assert clock.time_of_day(far) == "2031-05-05 03:50"


def test_a_time_of_day_has_its_seconds_where_that_is_soon() -> None:
    soon = datetime.now(UTC) + timedelta(seconds=20)

    with timezone.override(UTC):
        assert clock.time_of_day(soon).endswith(f"{soon:%H:%M:%S}")
