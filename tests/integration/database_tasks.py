"""Tasks of Django for a worker of its own: each writes into the folder of its test, and waits until it may end."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from django_distlock.contrib.tasks import unique_task
from tests.fixtures.calls import Calls
from tests.fixtures.eventually import eventually

#: How long a message keeps the name, and how long a task does that died.
LEASE = 4
LONGEST = 60
#: Seconds: a body begins so long after the last call, and at the latest so long after the first one.
QUIET, AT_MOST = 1, 3
unique = partial(unique_task, "once:{folder}", lease=LEASE, backend="database")


def body(folder: str) -> str:
    """Write down that it began, and end when the test says so."""
    with Path(folder, "began").open("a") as diary:
        diary.write(f"{os.getpid()}\n")
    eventually(Path(folder, "go").exists, LONGEST)
    return "done"


@unique()
def once(folder: str) -> str:
    return body(folder)


@unique(lease=60)
def once_within_a_minute(folder: str) -> str:
    return body(folder)


@unique(takes_context=True)
async def aonce(context: Any, folder: str) -> str:
    return body(folder)


@unique(again=True)
def once_more(folder: str) -> str:
    return body(folder)


debounced = partial(unique, lease=60, debounce=QUIET, at_most=AT_MOST)


@debounced()
async def asee(folder: str) -> None:
    Calls(folder).see()
