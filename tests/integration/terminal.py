"""A terminal that commands write to, or are answered from."""

import io


class Terminal(io.StringIO):
    """A text in memory that passes for a terminal."""

    def isatty(self) -> bool:
        return True
