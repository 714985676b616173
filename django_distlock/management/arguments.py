"""What the arguments of several commands have in common."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
#: Exit code of wrong arguments, argparse's own.
WRONG_ARGUMENTS = 2


def duration(text: str) -> float:
    """Return the seconds of a time such as 90, 1.5s, 15m, 12h, 7d or 2w."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", text.strip().lower())
    if found is None:
        msg = (
            f"{text!r} is not a time: write seconds, or a number with s, m, h, d or w, such as 12h."
        )
        raise ArgumentTypeError(msg)
    number, unit = found.groups()
    return float(number) * UNITS[unit]
