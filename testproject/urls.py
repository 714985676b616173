"""Where the demo's pages are."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

from . import views

urlpatterns = [
    path("", views.index, name="index"),
    path("accounts/<int:account_id>/", views.account, name="account"),
    path("accounts/<int:account_id>/charge/", views.charge, name="charge"),
    path("accounts/<int:account_id>/acharge/", views.acharge, name="acharge"),
    path(
        "accounts/<int:account_id>/charge-unlocked/", views.charge_unlocked, name="charge-unlocked"
    ),
    path("accounts/<int:account_id>/form/", views.charge_form, name="charge-form"),
    path("accounts/<int:account_id>/statement/", views.statement, name="statement"),
    path("admin/", admin.site.urls),
]
