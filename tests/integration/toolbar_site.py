"""A site with django-debug-toolbar, whose app must be installed from the start: prints what its panel records of two requests."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

import django
from django.conf import settings

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse

PANEL = "django_distlock.contrib.debug_toolbar.LocksPanel"


def page() -> HttpResponse:
    from django.http import HttpResponse

    return HttpResponse("<html><body>done</body></html>")


def view(request: HttpRequest) -> HttpResponse:
    from django_distlock import LockNotAcquired, force_release, lock
    from tests.contract.crew import elsewhere, held_in_thread

    with lock("fee:7", purpose="the fee"):
        elsewhere(lambda: lock("of another thread").acquire())
    try:
        with held_in_thread(lock("<b>")), lock("<b>", timeout=0):
            raise AssertionError
    except LockNotAcquired:
        pass
    lease = lock("lost").acquire()
    force_release("lost")
    assert lease
    return page()


async def aview(request: HttpRequest) -> HttpResponse:
    from django_distlock import lock

    async with lock("fee:" + "7" * 200):
        return page()


def main() -> None:
    settings.configure(
        DEBUG=True,
        SECRET_KEY="of no use",
        ALLOWED_HOSTS=["testserver"],
        ROOT_URLCONF=__name__,
        STATIC_URL="static/",
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        INSTALLED_APPS=["django.contrib.staticfiles", "debug_toolbar", "django_distlock"],
        MIDDLEWARE=["debug_toolbar.middleware.DebugToolbarMiddleware"],
        TEMPLATES=[
            {"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}
        ],
        DEBUG_TOOLBAR_PANELS=[PANEL],
        DEBUG_TOOLBAR_CONFIG={"SHOW_TOOLBAR_CALLBACK": lambda _: True},
        DISTLOCK={"default": {"BACKEND": "django_distlock.backends.locmem.LocMemBackend"}},
    )
    django.setup()
    from django.test import AsyncClient, Client
    from django.urls import include, path
    from django.utils.module_loading import import_string

    globals()["urlpatterns"] = [
        *(path(each.__name__, each) for each in (view, aview)),
        path("__debug__/", include("debug_toolbar.urls")),
    ]
    panel: Any = import_string(PANEL)
    record = panel.record_stats

    def tell(self: Any, stats: dict[str, Any]) -> None:
        record(self, stats)
        told = {"rows": stats["rows"], "subtitle": self.nav_subtitle, "page": self.content}
        sys.stdout.write(json.dumps(told) + "\n")

    panel.record_stats = tell
    has_icons = hasattr(panel.__base__, "nav_icon")  # since django-debug-toolbar 8
    for page in Client().get("/view"), asyncio.run(AsyncClient().get("/aview")):
        assert b"djDebug" in page.content
        assert (b"djdt-nav-icon" in page.content) == has_icons


if __name__ == "__main__":
    main()
