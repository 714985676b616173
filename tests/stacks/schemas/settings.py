"""The settings of processes that migrate the schemas of all tenants."""

from tests.integration.pods.settings import *  # noqa: F403
from tests.integration.pods.settings import DATABASES

SHARED_APPS = [
    "django_distlock.contrib.migrate",
    "django_tenants",
    "django.contrib.contenttypes",
    "tests.stacks.schemas",
    "django_distlock",
]
TENANT_APPS = ["tests.integration.pods"]
INSTALLED_APPS = [*SHARED_APPS, *TENANT_APPS]
TENANT_MODEL = "schemas.Client"
TENANT_DOMAIN_MODEL = "schemas.Domain"
DATABASES["default"]["ENGINE"] = "django_tenants.postgresql_backend"
DATABASE_ROUTERS = ["django_tenants.routers.TenantSyncRouter"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
