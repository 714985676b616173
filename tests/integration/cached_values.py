"""What processes of test_cached_values.py do."""

from __future__ import annotations

import time

from django.core.cache import caches

from django_distlock.contrib.cache import get_or_compute
from tests.fixtures.child import hear_word, say

#: Seconds that a value takes.
WORK = 0.3


def get_report(key: str, cache: str, using: str) -> str:
    """Return the value, which tells how often it was computed."""

    def compute() -> str:
        time.sleep(WORK)
        return f"report {caches[cache].incr(f'{key}:computed')}"

    say("ready")
    hear_word("go")
    return get_or_compute(key, compute, timeout=60, stale=60, cache=cache, using=using, wait=30)
