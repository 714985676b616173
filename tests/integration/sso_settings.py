"""A site whose users log in on another host, as with single sign-on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.http import HttpRequest, HttpResponseBase, HttpResponseRedirect

from testproject.settings import *  # noqa: F403
from testproject.settings import MIDDLEWARE

if TYPE_CHECKING:
    from collections.abc import Callable

MIDDLEWARE = [*MIDDLEWARE, "tests.integration.sso_settings.login_elsewhere"]


def login_elsewhere(
    view: Callable[[HttpRequest], HttpResponseBase],
) -> Callable[[HttpRequest], HttpResponseBase]:
    def middleware(request: HttpRequest) -> HttpResponseBase:
        if request.path == "/admin/login/":
            host = request.get_host().replace("127.0.0.1", "localhost")
            return HttpResponseRedirect(f"http://{host}/")
        return view(request)

    return middleware
