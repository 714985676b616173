"""Accounts and fees in the admin; that of the locks comes with django_distlock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib import admin

from django_distlock.contrib.editing.admin import EditLockMixin

from .models import Account, Fee

if TYPE_CHECKING:
    from django.http import HttpRequest


@admin.register(Account)
class AccountAdmin(EditLockMixin, admin.ModelAdmin):  # type: ignore[type-arg]  # Django takes no argument at run time
    """Accounts and what they hold; one user at a time edits an account."""

    list_display = ("name", "opening_balance", "balance", "fence")
    search_fields = ("name",)


@admin.register(Fee)
class FeeAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # as above
    """Receipts: to be read, not written."""

    list_display = ("account", "amount", "charged_at")
    list_select_related = ("account",)
    list_filter = ("account",)

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Refuse: charge_fee() writes the receipts."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Fee | None = None) -> bool:
        """Refuse: a receipt stays as it is."""
        return False
