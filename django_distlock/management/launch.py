"""Becomes the command that run_locked runs, after it has asked to be ended with run_locked.

It is run as a file of its own, so that it imports neither Django nor this package.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

#: Exit codes of shells for a command that does not exist, and for one that cannot be run.
NOT_FOUND, NOT_EXECUTABLE = 127, 126
#: prctl(2).
PR_SET_PDEATHSIG = 1


def become(parent: int, command: list[str]) -> None:
    """Run *command* in this process; on Linux it gets SIGTERM should *parent* be killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        # It was killed before this process had asked for the signal.
        sys.exit(128 + signal.SIGTERM)
    try:
        os.execvp(command[0], command)  # noqa: S606 - no shell is wanted
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
