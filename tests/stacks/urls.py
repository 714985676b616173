"""The pages of a stack: the admin, and those that its packages bring."""

from __future__ import annotations

from django.apps import apps
from django.contrib import admin
from django.urls import include, path
from django.views.i18n import JavaScriptCatalog

from django_distlock.contrib.editing import edit_lock_view

urlpatterns = [
    path("admin/", admin.site.urls),
    path("jsi18n/", JavaScriptCatalog.as_view(), name="jsi18n"),
    path("edit-lock/", edit_lock_view, name="distlock_edit_lock"),
]
if apps.is_installed("grappelli"):
    urlpatterns.append(path("grappelli/", include("grappelli.urls")))
