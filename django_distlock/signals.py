"""Django signals about locks; the error of a receiver never affects a lock.

The sender is the class of the backend. Every signal has *name* and *using* (the alias). All but the last
have *template*: the text with fields from which such names are made, "" if that is not known. And:

``lock_acquired``: *lease*, *waited* (seconds), *requests* (to the server, until it was granted), *waited_for* (a holder)
``lock_busy``: *waited* (seconds), *requests*, *holder*, *remaining* (seconds), *reserved_until*
``lock_extended``: *lease*
``lock_released``: *lease*, *held*, *took* (seconds: how long it was held, how long its release took)
``lock_lost``: *lease*, *held* (seconds), *reason*
``lock_detached``: *lease*, *held* (seconds)
``backend_failed``: *error* of the server, and *waited* (seconds), *requests* of an acquire; None if a renewal failed
``lock_forced``: *holder* of the lease that an operator has ended
"""

from __future__ import annotations

from django.dispatch import Signal

lock_acquired = Signal()
lock_busy = Signal()
lock_released = Signal()
lock_lost = Signal()
lock_detached = Signal()
lock_extended = Signal()
lock_forced = Signal()
backend_failed = Signal()
