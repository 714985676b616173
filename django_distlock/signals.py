"""Django signals about locks; the error of a receiver never affects a lock.

The sender is the class of the backend. Every signal has *name* and *using* (the alias); all but the last
have *template* (what the names of such locks are made of, "" if that is not known), and:

``lock_acquired``: *lease*, *waited* (seconds)
``lock_busy``: *waited* (seconds), *holder*, *remaining* (seconds), *reserved_until*
``lock_extended``: *lease*
``lock_released``: *lease*, *held*, *took* (seconds: how long it was held, how long its release took)
``lock_lost``: *lease*, *held* (seconds), *reason*
``lock_detached``: *lease*, *held* (seconds)
``backend_failed``: *error*, of a server that was asked for a lock, and *waited* (seconds); None: for more time
``lock_forced``: *holder*, whose lease an operator has ended
"""

from __future__ import annotations

from asyncio import _get_running_loop
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

from django.dispatch import Signal

from .engine.background import background

if TYPE_CHECKING:
    from collections.abc import Hashable

    from .lease import Lease

lock_acquired = Signal()
lock_busy = Signal()
lock_released = Signal()
lock_lost = Signal()
lock_detached = Signal()
lock_extended = Signal()
lock_forced = Signal()
backend_failed = Signal()

#: The lane of receivers; no alias has this name.
_RECEIVERS = ("receivers",)


def announce(signal: Signal, lease: Lease, /, **facts: Any) -> None:
    """Send *signal*, of this lease, to its receivers."""
    if signal.receivers:
        known = {"name": lease.name, "using": lease.using, "template": lease.template}
        send(signal, type(lease.backend), **known, **facts)


def send(signal: Signal, sender: Hashable, **facts: Any) -> None:
    """Send *signal* to its receivers; Django logs their errors.

    In an event loop another thread sends it: a receiver may block, and the one thread in which
    Django runs synchronous code may be waiting for this lock.
    """
    if not signal.has_listeners(sender):
        return
    deliver = partial(signal.send_robust, sender, **facts)
    if _get_running_loop() is None:
        deliver()
    else:
        background.submit(_RECEIVERS, partial(copy_context().run, deliver))
