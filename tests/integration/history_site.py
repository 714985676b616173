"""A site whose admin has the history of the locks, and not the locks themselves."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

from django_distlock.admin import MethodLockAdmin
from django_distlock.models import MethodLock

site = admin.AdminSite()
site.register(MethodLock, MethodLockAdmin)
urlpatterns = [path("admin/", site.urls)]
