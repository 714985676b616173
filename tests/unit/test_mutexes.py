"""Mutexes of short sections."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from django_distlock.ground.mutexes import has_interrupted_a_section, section


def test_other_threads_may_make_sections_while_they_are_looked_at() -> None:
    made = [section(), section()]

    def make_one_more(frame: FrameType, event: str, argument: object) -> Any:
        made.append(section())
        return make_one_more

    before = sys.gettrace()
    sys.settrace(make_one_more)
    try:
        is_inside = has_interrupted_a_section()
    finally:
        sys.settrace(before)

    assert not is_inside
    with made[-1]:
        assert has_interrupted_a_section()
