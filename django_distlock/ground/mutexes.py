"""Mutexes for short sections of code: code that interrupts the thread in a section can enter it again.

A signal handler, or a finalizer that the garbage collector runs, may acquire a lock in the middle of a
section; a plain lock would then wait for its own thread for ever. So every section must stay correct if
another section runs at any of its calls. Code in a section must not wait: all other threads would wait with it.
"""

from __future__ import annotations

import sys
import threading
from _thread import RLock
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")

#: Used as a set. A WeakSet cannot be read while another thread adds to it; keyrefs() reads a dict in one step.
_sections: WeakKeyDictionary[RLock, None] = WeakKeyDictionary()


class _ThisThread(threading.local):
    #: Whether this thread carries out the requests of a backend: while it waits, no lock of the backend goes on.
    serves_locks = False


this_thread = _ThisThread()


if sys.version_info[:2] == (3, 14):

    class _Mutex(RLock):
        """An RLock for CPython 3.14, where an asynchronous exception can come between __enter__() and the ``with`` block.

        It would leave the mutex taken for good: https://github.com/python/cpython/issues/148874. After a function of
        Python, none can come there, only in it. __exit__() stays the one of RLock: it releases before one can come.
        """

        def __enter__(self) -> bool:
            before = self._recursion_count()
            try:
                return self.acquire()
            except BaseException:
                if self._recursion_count() > before:
                    self.release()
                raise


def new_mutex() -> RLock:
    """Return a new threading.RLock, which is written in C.

    So no asynchronous exception can come between taking the mutex and its ``with`` block.
    """
    made = threading.RLock()
    # gevent and eventlet have classes of their own.
    if sys.version_info[:2] == (3, 14) and type(made) is RLock:
        return _Mutex()
    return made


def section() -> RLock:
    """Return a new mutex for sections that never wait."""
    made = new_mutex()
    _sections[made] = None
    return made


class Taken(Exception):
    """Another thread has the mutex."""


def run_in(mutex: RLock, act: Callable[[], _T], seconds: float = 0.0) -> _T:
    """Call *act* with *mutex* taken, as in ``with mutex``, but Taken if it does not come free within *seconds*.

    An exception that is set on a waiting thread comes right after acquire(): so that is in the ``try``, and
    release() is the first call of ``finally``.
    """
    try:
        if not mutex.acquire(timeout=seconds):
            raise Taken
        return act()
    finally:
        try:  # noqa: SIM105 - suppress() would be a call before release()
            mutex.release()
        except RuntimeError:
            pass  # another thread has it


def owned(mutex: RLock) -> bool:
    """Return whether the running thread is inside a section of *mutex*."""
    is_owned: bool = mutex._is_owned()  # type: ignore[attr-defined]  # noqa: SLF001 - as threading.Condition asks
    return is_owned


def has_interrupted_a_section() -> bool:
    """Return True if this code, a signal handler or finalizer, has interrupted its thread in a section.

    A thread that carries out the requests of others counts as always in a section.
    """
    known = [each() for each in _sections.keyrefs()]
    return this_thread.serves_locks or any(owned(each) for each in known if each is not None)
