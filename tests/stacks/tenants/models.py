"""The tenants, and their domains."""

from __future__ import annotations

from django.db import models
from django_tenants.models import DomainMixin, TenantMixin


class Shop(TenantMixin):
    """A tenant: django-tenants makes its schema."""

    name = models.CharField(max_length=100)

    class Meta:
        app_label = "tenants"


class Domain(DomainMixin):
    """The address of a tenant."""

    class Meta:
        app_label = "tenants"
