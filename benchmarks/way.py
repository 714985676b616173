"""How long the way of one uncontended acquire is: our files it visits, and our calls it makes."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import django_distlock

if TYPE_CHECKING:
    from types import CodeType, FrameType

    from benchmarks.contenders import Contender

_OURS = str(Path(django_distlock.__file__).parent)


def way(ours: Contender) -> Counter[CodeType]:
    """Return how often each of our functions is called by one acquire of ``with lock(...)``, warm.

    A generator that goes on counts as another call.
    """
    calls: Counter[CodeType] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_OURS):
            calls[frame.f_code] += 1

    for _ in range(100):
        ours.take()
        ours.free()
    sys.setprofile(note)
    try:
        ours.take()
    finally:
        sys.setprofile(None)
    ours.free()
    return calls


def files_of(calls: Counter[CodeType]) -> Counter[str]:
    """Return the calls by file, from our package down."""
    files: Counter[str] = Counter()
    for code, count in calls.items():
        files[code.co_filename.removeprefix(_OURS).lstrip("/")] += count
    return files
