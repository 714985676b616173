"""Rows for people and for pipes: a table on a terminal, lines with tabs elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from django.core.management.base import OutputWrapper


def write_rows(out: OutputWrapper, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write *rows* to *out*; without rich, a terminal gets lines with tabs, too."""
    if out.isatty():
        try:
            out.write(_table(headings, rows), ending="")
        except ImportError:
            out.write("\t".join(headings))
        else:
            return
    for row in rows:
        out.write("\t".join(row))


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return *rows* as wide as the terminal; ImportError without rich."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console()
    with console.capture() as captured:
        console.print(table)
    return captured.get()
