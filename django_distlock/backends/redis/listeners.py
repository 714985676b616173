"""Of the waiters of this process for one lock, one listens on the server, for all, on one connection."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from django_distlock.engine import clock
from django_distlock.engine.bells import Bell
from django_distlock.engine.values import Request

#: Seconds between two times that the places of the others are kept: well within their patience.
KEEP = 0.15
#: Seconds after which another one listens, as who does may stand in an event loop that is blocked.
STALE = 1.0


@dataclass(slots=True)
class _Line:
    waiting: dict[str, tuple[Request, Bell]] = field(default_factory=dict)
    #: Those who were rung, and have not asked again since: their places are theirs to keep.
    called: set[str] = field(default_factory=set)
    listener: str = ""
    heard_at: float = 0.0
    kept_at: float = 0.0

    @property
    def is_heard(self) -> bool:
        is_fresh = clock.wait_time() - self.heard_at < STALE
        return is_fresh and self.listener in self.waiting


class Listeners:
    """Who waits for what, by lock. No I/O."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._lines: dict[str, _Line] = {}

    def listens(self, request: Request, bell: Bell) -> bool:
        """Note that *bell* is waited on; return whether *request* is the one to listen."""
        with self._mutex:
            line = self._lines.setdefault(request.key, _Line())
            line.waiting[request.owner] = request, bell
            line.called.discard(request.owner)
            if not line.is_heard:
                line.listener = request.owner
            if line.listener != request.owner:
                return False
            line.heard_at = clock.wait_time()
            return True

    def is_behind(self, request: Request) -> bool:
        """Return whether another one listens for it."""
        with self._mutex:
            line = self._lines.get(request.key)
            return line is not None and line.is_heard and line.listener != request.owner

    def owners(self, request: Request) -> list[str]:
        with self._mutex:
            return list(self._lines[request.key].waiting)

    def to_keep(self, request: Request) -> list[Request]:
        with self._mutex:
            line, now = self._lines[request.key], clock.wait_time()
            if now - line.kept_at < KEEP:
                return []
            line.kept_at = now
            absent = {request.owner, *line.called}
            return [other for owner, (other, _) in line.waiting.items() if owner not in absent]

    def ring(self, request: Request, owner: str) -> None:
        with self._mutex:
            line = self._lines[request.key]
            if owner in line.waiting:
                line.called.add(owner)
                if not line.waiting[owner][1].ring():
                    del line.waiting[owner]

    def leave(self, request: Request) -> None:
        """Wait no more; somebody else listens from now on."""
        with self._mutex:
            line = self._lines.get(request.key)
            if line is None or line.waiting.pop(request.owner, None) is None:
                return
            line.called.discard(request.owner)
            # Also if it had been rung to listen itself, and goes before it has done so.
            if line.listener not in line.waiting:
                # One whose event loop is gone cannot listen.
                while line.waiting and not next(iter(line.waiting.values()))[1].ring():
                    del line.waiting[next(iter(line.waiting))]
            if not line.waiting:
                del self._lines[request.key]
