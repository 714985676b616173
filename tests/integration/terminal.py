"""A terminal that commands write to, or are answered from."""

import io
import os
import pty
from typing import Any

from django.core.management import call_command


class Terminal(io.StringIO):
    """A text in memory that passes for a terminal."""

    def isatty(self) -> bool:
        return True


def answer_at_a_terminal(answer: str) -> None:
    """Give this process a terminal at which somebody has typed a line."""
    ours, theirs = pty.openpty()
    os.dup2(theirs, 0)
    os.write(ours, f"{answer}\n".encode())


def printed(command: str, *arguments: str, **options: Any) -> str:
    """Run a command, and return what it prints."""
    out = io.StringIO()
    call_command(command, *arguments, **options, stdout=out)
    return out.getvalue()
