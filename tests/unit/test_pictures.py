"""The drawings of the documentation: readable in light and dark, and they say what the pages and the code say."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from django_distlock.ground.clock import drift
from testproject.fees import after
from tests.fixtures.pages import DOCS, PAGES

PICTURES = sorted((DOCS / "_static").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
#: The pages of backends, by the names that people are told.
PAGE_OF = {
    "Database": "database",
    "Row lock": "rowlock",
    "Advisory lock": "advisory",
    "Redis": "redis",
    "Redlock": "redlock",
    "memcached": "memcached",
    "Memory": "locmem",
    "etcd": "etcd",
    "ZooKeeper": "zookeeper",
}


def texts(name: str) -> list[str]:
    """Return the texts of a picture as one sees them, line by line."""
    root = ET.parse(DOCS / "_static" / f"{name}.svg").getroot()
    return [" ".join(each.itertext()) for each in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_a_picture_is_read_aloud_and_has_colours_for_light_and_dark(picture: Path) -> None:
    root = ET.parse(picture).getroot()
    style = root.findtext(f"{SVG}style") or ""
    schemes = re.findall(r"\{ (--paper: [^}]+;)", style)

    assert root.get("role") == "img"
    named = root.get("aria-labelledby", "").split()
    assert named == [root.find(f"{SVG}{each}").get("id") for each in ("title", "desc")]  # type: ignore[union-attr]  # an error here is a failure too
    light, dark, light_again, dark_again = (re.sub(r" max-width.*", "", each) for each in schemes)
    assert (light, dark) == (light_again, dark_again)
    assert re.findall(r"--\w+", light) == re.findall(r"--\w+", dark)
    # It stands in the page beside others.
    assert all(
        each.startswith((f"#{root.get('id')}", "@media", "body", "/*"))
        for each in style.strip().splitlines()
    )


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_a_picture_is_on_a_page(picture: Path) -> None:
    assert [page.name for page in PAGES if f"_static/{picture.name}" in page.read_text()]


def test_the_fees_are_those_of_the_example() -> None:
    first = after(1, Decimal("100.00"))
    second = after(2, Decimal("100.00"))

    assert (str(first), str(second)) == ("97.00", "94.09")
    told = texts("two-servers")
    assert f"{first}: one of the two fees is lost" in told
    assert f"{second}: both fees are taken" in told


def test_the_deadline_is_that_of_the_code() -> None:
    assert drift(100) == pytest.approx(1.002)
    assert any("1 % and 2 ms are taken off" in each for each in texts("lease"))


def test_the_answers_are_those_of_the_page_in_their_order() -> None:
    page = (DOCS / "howto" / "choose-a-backend.md").read_text()
    decide = page.partition("## Decide")[2].partition("```")[0]
    linked = re.findall(r"\(\.\./reference/backends/(\w+)\.md", decide)
    root = ET.parse(DOCS / "_static" / "choose-a-backend.svg").getroot()
    answers = [each.text or "" for each in root.iter(f"{SVG}tspan") if each.get("class") == "bold"]

    assert [PAGE_OF[name] for answer in answers for name in answer.split(" or ")] == linked
