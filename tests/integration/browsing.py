"""Somebody at a browser: what tests of pages do and look at."""

from __future__ import annotations

import base64
from contextlib import suppress
from typing import Any, cast

from django.contrib.auth.models import User
from django.test import Client
from selenium.common.exceptions import StaleElementReferenceException, WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import WebDriverWait

CUT_OFF = """
return [...document.querySelectorAll("#container *")]
    .filter((each) => !each.closest("select, input, svg, .skip-to-content-link, .visually-hidden"))
    .filter((each) => each.getBoundingClientRect().right > document.documentElement.clientWidth + 1
        || (each.clientWidth && each.scrollWidth > each.clientWidth + 1))
    .map((each) => each.outerHTML.slice(0, 200))"""
#: What the page shows, read at one moment: it may be refreshed between two.
LOOK = """
const texts = (selector) => [...document.querySelectorAll(selector)].map((each) => each.innerText);
const box = document.querySelector("input[name=selected]:checked");
document.dispatchEvent(new Event("visibilitychange")); // it refreshes itself then
return {
    names: texts("#result_list tbody th"),
    selected: box && box.closest("tr").querySelector("th").innerText,
    has_focus: box && box === document.activeElement,
    is_new: box && !box.dataset.seen,
    status: document.getElementById("distlock-status").innerText,
    scrolled: window.scrollY,
};"""
ROWS = """
return [...document.querySelectorAll("#content tbody tr")].map((row) =>
    [...row.querySelectorAll("td:not(.action-checkbox, .distlock-pick), th")].map((cell) => cell.innerText.trim()));"""
#: Of a page whose window was marked: whether another has come whole.
IS_NEXT = "return !window.isLeft && document.readyState === 'complete';"


class Operator:
    """Somebody at a browser, logged in."""

    def __init__(self, browser: WebDriver, site: str) -> None:
        self.browser = browser
        self.site = site

    def log_in(self, user: User) -> None:
        """Give the browser a session of *user*, as the form would, which takes a second of the processor."""
        visit = Client()
        visit.force_login(user)
        cookie = {"name": "sessionid", "value": visit.cookies["sessionid"].value, "url": self.site}
        cast("Any", self.browser).execute_cdp_cmd("Network.setCookie", cookie)

    def open(self, path: str) -> None:
        self.browser.get(self.site + path)

    def find(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def click(self, selector: str, by: str = By.CSS_SELECTOR) -> None:
        """Click what *selector* finds, again if the list was refreshed in between."""
        while True:
            with suppress(StaleElementReferenceException):
                return self.browser.find_element(by, selector).click()

    def press(self, selector: str, by: str = By.CSS_SELECTOR) -> None:
        """Click, and wait until the next page has come."""
        self.browser.execute_script("window.isLeft = true")
        self.click(selector, by)
        # Not by what the browser says of an element: asked while the page goes, it may fail.
        wait = WebDriverWait(self.browser, 10, ignored_exceptions=[WebDriverException])
        wait.until(lambda browser: browser.execute_script(IS_NEXT))

    def follow(self, text: str) -> None:
        """Click the link with this text, and wait until the next page has come."""
        self.press(text, By.LINK_TEXT)

    def rows(self) -> list[list[str]]:
        """Return the cells of the table, row by row, as they are at one moment."""
        return list(self.browser.execute_script(ROWS))

    def look(self) -> dict[str, Any]:
        """Return what the list shows, and have it refreshed."""
        return dict(self.browser.execute_script(LOOK))

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        cast("Any", self.browser).execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def choose(self, theme: str) -> None:
        self.open("/")
        self.browser.execute_script(f"localStorage.setItem('theme', '{theme}')")

    def cut_off(self) -> list[str]:
        """Return the text of what reaches beyond the right edge of the window."""
        return list(self.browser.execute_script(CUT_OFF))

    def picture(self) -> bytes:
        """Return what the window shows, without scroll bars."""
        self.browser.execute_script("document.documentElement.style.scrollbarWidth = 'none'")
        how = {"format": "webp", "quality": 60}
        taken = cast("Any", self.browser).execute_cdp_cmd("Page.captureScreenshot", how)
        return base64.b64decode(taken["data"])

    def message(self) -> str:
        return str(self.find(".messagelist li").text)
