"""The testproject as worker processes run it: locks are where DISTLOCK_WORKERS_ALIAS says."""

import json
import os

from testproject.settings import *  # noqa: F403 - settings of the same project, with other locks
from testproject.settings import CACHES, DATABASES, DISTLOCK

DISTLOCK["default"] = json.loads(os.environ["DISTLOCK_WORKERS_ALIAS"])
# An error is told in words, not as a page.
DEBUG = False
ROOT_URLCONF = "tests.integration.worker_site"

if database := os.environ.get("DISTLOCK_ATOMIC_DATABASE"):
    DATABASES["default"] = {**DATABASES[database], "ATOMIC_REQUESTS": True}
    ROOT_URLCONF = os.environ.get("DISTLOCK_WORKERS_URLS", "tests.integration.atomic_site")
if answers := os.environ.get("DISTLOCK_WORKERS_ANSWERS"):
    CACHES["answers"] = json.loads(answers)
