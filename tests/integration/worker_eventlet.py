"""eventlet's own WSGI server: `python -m tests.integration.worker_eventlet PORT WORKERS`."""

from __future__ import annotations

import os
import signal
import socket
import sys
import warnings


def main(port: int, workers: int) -> None:
    """Serve in so many processes, of which the first ends the others."""
    listener = socket.create_server(("127.0.0.1", port))
    children: list[int] = []

    def end(*_: object) -> None:
        for child in children:
            os.kill(child, signal.SIGTERM)
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    # First of all: processes that share the hub of one eventlet take each other's events.
    for _ in range(workers - 1):
        children.append(pid := os.fork())
        if pid == 0:
            children.clear()
            break
    serve(listener)


def serve(listener: socket.socket) -> None:
    """Patch, then import all that is to be patched."""
    warnings.simplefilter("ignore")  # eventlet announces its end

    import eventlet

    eventlet.monkey_patch()

    from eventlet import wsgi

    from tests.integration import worker_site

    wsgi.server(socket.socket(fileno=listener.detach()), worker_site.wsgi)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
