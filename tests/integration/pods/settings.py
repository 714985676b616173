"""The settings of processes that migrate a database of their own, named by the environment."""

import json
import os

import testproject.settings  # noqa: F401 - has PyMySQL stand in for mysqlclient

SECRET_KEY = "of no use"
INSTALLED_APPS = ["django_distlock", "tests.integration.pods", *json.loads(os.environ["PODS_APPS"])]
DATABASES = json.loads(os.environ["PODS_DATABASES"])
DISTLOCK = {alias: {"OPTIONS": {"using": alias}} for alias in DATABASES}
DISTLOCK |= json.loads(os.environ["PODS_DISTLOCK"])
USE_TZ = True
