#!/usr/bin/env python3
"""Django's commands with the demo's settings, from any folder."""

from __future__ import annotations

import sys
from pathlib import Path

# Python puts this file's own folder first, where it would find `testproject.settings` as `settings`.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from testproject.__main__ import main  # noqa: E402 - needs the path above

if __name__ == "__main__":
    main()
