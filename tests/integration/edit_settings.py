"""The site of edit_site.py for a browser, with a strict Content-Security-Policy."""

from testproject.settings import *  # noqa: F403
from testproject.settings import MIDDLEWARE

ROOT_URLCONF = "tests.integration.edit_site"
MIDDLEWARE = [*MIDDLEWARE, "tests.integration.edit_site.strict"]
