"""Members of the staff, who look at locks in the admin."""

import uuid
from typing import Any

from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import path, reverse

from django_distlock.models import MethodLock
from testproject.urls import urlpatterns

LIST = reverse("admin:django_distlock_heldlock_changelist")
FORCE = reverse("admin:django_distlock_heldlock_force_release")


def detail_url(row: MethodLock) -> str:
    """Return the address of the page of one lock."""
    return reverse("admin:django_distlock_heldlock_change", args=[row.method_name])


def addresses() -> tuple[Any, ...]:
    """Return the addresses of the project, those of the admin made now."""
    return (path("admin/", admin.site.urls), *urlpatterns)


def superuser() -> Client:
    """Return the browser of somebody who may do everything."""
    client = Client()
    client.force_login(User.objects.create_superuser(uuid.uuid4().hex[:12]))
    return client


def client_of(*permissions: str, csrf: bool = False) -> Client:
    """Return the browser of a member of the staff who has these permissions."""
    user = User.objects.create_user(uuid.uuid4().hex[:12], is_staff=True)
    # A transaction that reads first, as set() makes one, fails on SQLite when others write meanwhile.
    grants = User.user_permissions.through.objects
    for permission in Permission.objects.filter(codename__in=permissions):
        grants.create(user=user, permission=permission)
    client = Client(enforce_csrf_checks=csrf)
    client.force_login(user)
    return client
