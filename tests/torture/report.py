"""The page that a run writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.torture.run import Result


def page(results: Sequence[Result], seed: int) -> str:
    return ""
