"""What a run has measured: printed, saved as JSON and Markdown, and drawn."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.tables import CROWDS, KINDS, Row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

#: What is measured: the Debian packages of the servers, and the libraries of their clients and of the peers.
SERVERS = (
    *("postgresql-15", "mariadb-server-core", "redis-server", "memcached"),
    *("zookeeper", "etcd-server"),
)
LIBRARIES = (
    *("Django", "psycopg", "PyMySQL", "redis", "pymemcache", "pylibmc", "kazoo"),
    *(
        "django-db-mutex",
        "django-pglock",
        "django-redis",
        "pottery",
        "python-redis-lock",
        "sherlock",
    ),
)
FIGURES = "benchmarks.json"
#: Ours, and others.
COLOURS = "#0c7c59", "#9aa5b1"
#: By the name of a variant: the colour of texts and lines.
VARIANTS = {"light": "#1f2933", "dark": "#e4e7eb"}


class Report:
    """The figures of a run, by table and by what is measured."""

    def __init__(self, no_disk: bool) -> None:
        self._no_disk = no_disk
        self._tables: dict[str, dict[str, list[Row]]] = {}

    def add(self, kind: str, title: str, rows: list[Row]) -> None:
        """Note the *rows* of the table *kind* under *title*."""
        if rows:
            self._tables.setdefault(kind, {})[title] = rows

    def show(self, console: Console) -> None:
        """Print all tables."""
        for kind, sections in self._tables.items():
            table = Table(KINDS[kind].title, *KINDS[kind].headings)
            for title, rows in sections.items():
                table.add_section()
                table.add_row(f"[bold]{title}")
                for name, figures in rows:
                    table.add_row(name, *_texts(kind, figures))
            console.print(table)

    def save(self, folder: Path) -> None:
        """Write the figures, and what they were measured with, as JSON."""
        folder.mkdir(parents=True, exist_ok=True)
        tables = {
            kind: {
                title: {name: _numbers(row) for name, row in rows} for title, rows in found.items()
            }
            for kind, found in self._tables.items()
        }
        text = json.dumps({**_machine(self._no_disk), "tables": tables}, indent=1)
        (folder / FIGURES).write_text(text + "\n", encoding="utf-8")


def draw(folder: Path) -> None:
    """Write tables and charts of the figures that are saved in *folder* beside them."""
    found = json.loads((folder / FIGURES).read_text(encoding="utf-8"))
    (folder / "tables.md").write_text("\n".join(_markdown(found)) + "\n", encoding="utf-8")
    for variant, colour in VARIANTS.items():
        for kind, sections in found["tables"].items():
            if draw_one := CHARTS.get(kind):
                _chart(folder / f"{kind}-{variant}.svg", colour, draw_one, kind, sections)


def _machine(no_disk: bool) -> dict[str, Any]:
    processor = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    load, *_ = os.getloadavg()
    return {
        "date": datetime.now(tz=UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} processors ({processor}), {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load at the end": round(load, 1),
        "databases wait for their disks": not no_disk,
        "servers": {name: found for name in SERVERS if (found := _of_debian(name))},
        "libraries": {name: version(name) for name in LIBRARIES},
    }


def _of_debian(package: str) -> str:
    asked = ["dpkg-query", "--show", "--showformat=${Version}", package]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout  # noqa: S603 - our own words


def _numbers(figures: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(figure) else round(figure, 3) for figure in figures]


def _texts(kind: str, figures: Sequence[float | None]) -> Iterator[str]:
    for figure, digits in zip(figures, KINDS[kind].headings.values(), strict=True):
        yield "" if figure is None or math.isnan(figure) else f"{figure:,.{digits}f}"


def _markdown(found: dict[str, Any]) -> Iterator[str]:
    disks = "waited" if found["databases wait for their disks"] else "did not wait"
    yield f"Measured on {found['date']}: {found['machine']}; Python {found['python']}."
    yield f"The databases {disks} for their disks."
    for kind in ("servers", "libraries"):
        listed = ", ".join(f"{name} {number}" for name, number in found[kind].items())
        yield f"{kind.capitalize()}: {listed}."
    for kind, sections in found["tables"].items():
        yield f"\n### {KINDS[kind].title}\n"
        if kind in CHARTS:
            for variant in VARIANTS:
                yield f"```{{image}} ../_static/benchmarks/{kind}-{variant}.svg"
                yield f":class: only-{variant}\n:alt: {KINDS[kind].title}; the figures stand in the table below\n```\n"
        headings = ["", *KINDS[kind].headings]
        yield f"| {' | '.join(headings)} |"
        yield f"|---{'|--:' * (len(headings) - 1)}|"
        for title, rows in sections.items():
            yield f"| **{title}** |{' |' * (len(headings) - 1)}"
            for name, figures in rows.items():
                yield f"| {name} | {' | '.join(_texts(kind, figures))} |"


def _bars(kind: str, heading: str) -> Any:
    """Return what draws one panel for each section, with a bar for each contender."""
    column = list(KINDS[kind].headings).index(heading)

    def draw_all(figure: Any, sections: dict[str, dict[str, list[float]]]) -> None:
        many = [len(rows) for rows in sections.values()]
        panels = figure.subplots(len(many), 1, squeeze=False, height_ratios=many)[:, 0]
        figure.set_size_inches(8, 0.24 * sum(many) + 0.5 * len(many))
        for panel, (title, rows) in zip(panels, sections.items(), strict=True):
            names, values = list(rows), [figures[column] for figures in rows.values()]
            panel.barh(names, values, color=[COLOURS["distlock" not in name] for name in names])
            panel.set_title(f"{title}, {heading}", loc="left", fontsize=9)
            panel.invert_yaxis()
            for place, value in enumerate(values):
                panel.annotate(
                    f" {value:,.{KINDS[kind].headings[heading]}f}",
                    (value, place),
                    va="center",
                    fontsize=8,
                )

    return draw_all


def _lines(kind: str, headings: Sequence[str], along: str, up: str) -> Any:
    """Return what draws a line for each of ours: how a figure grows."""
    columns = [list(KINDS[kind].headings).index(heading) for heading in headings]
    places = [heading.partition(":")[0] for heading in headings]

    def draw_all(figure: Any, sections: dict[str, dict[str, list[float]]]) -> None:
        figure.set_size_inches(8, 5)
        panel = figure.subplots()
        for rows in sections.values():
            for name, figures in rows.items():
                if "distlock" in name and None not in (
                    values := [figures[each] for each in columns]
                ):
                    panel.plot(places, values, marker="o", label=name.partition(" ")[2])
        panel.set_yscale("log")
        low, high = panel.get_ylim()
        panel.set_ylim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))
        panel.yaxis.set_major_formatter("{x:,g}")
        panel.set_xlabel(along)
        panel.set_ylabel(up)
        panel.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))

    return draw_all


#: By table: what draws its chart.
CHARTS = {
    "cycle": _bars("cycle", "µs"),
    "handoff": _bars("handoff", "ms"),
    "crowd": _lines(
        "crowd", [f"{size}: holds a second" for size in CROWDS], "processes", "holds a second"
    ),
    "names": _lines("names", list(KINDS["names"].headings), "names used", "µs a cycle"),
    "waiters": _lines(
        "waiters", list(KINDS["waiters"].headings), "tasks waiting", "ms from grant to grant"
    ),
    "places": _lines("places", list(KINDS["places"].headings), "places", "µs a cycle"),
}


def _chart(path: Path, colour: str, draw_all: Any, kind: str, sections: dict[str, Any]) -> None:
    import matplotlib as mpl
    from cycler import cycler
    from matplotlib.figure import Figure

    coloured = "text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"
    # Texts stay texts, the same figures give the same file, and there are more lines than colours.
    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": kind,
        "font.family": "sans-serif",
        "axes.prop_cycle": cycler(linestyle=["-", "--"]) * mpl.rcParams["axes.prop_cycle"],
    }
    with mpl.rc_context(style | dict.fromkeys(coloured, colour)):
        figure = Figure(layout="constrained")
        draw_all(figure, sections)
        for panel in figure.axes:
            panel.spines[["top", "right"]].set_visible(False)
            panel.tick_params(labelsize=8)
        figure.savefig(path, transparent=True, metadata={"Date": None})
