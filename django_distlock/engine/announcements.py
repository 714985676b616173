"""Sending the signals of locks to their receivers."""

from __future__ import annotations

from asyncio import _get_running_loop
from contextvars import copy_context
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any

from .background import background

if TYPE_CHECKING:
    from collections.abc import Hashable

    from django.dispatch import Signal

#: The background lane in which receivers run; no alias can have this name.
_RECEIVERS = ("receivers",)


def send(signal: Signal, sender: Hashable, **facts: Any) -> None:
    """Send *signal* to its receivers; Django logs their errors.

    In an event loop, a background thread sends the signal: a receiver may block, and the one thread in which
    Django runs synchronous code may be waiting for this lock.
    """
    if not signal.has_listeners(sender):
        return
    deliver = partial(signal.send_robust, sender, **facts)
    if _get_running_loop() is None:
        deliver()
    else:
        background.submit(_RECEIVERS, partial(copy_context().run, deliver))


def wait_for_receivers(seconds: float) -> None:
    """Wait until all signals sent before in event loops have been received, for at most *seconds*."""
    received = Event()
    background.submit(_RECEIVERS, received.set)
    received.wait(seconds)
