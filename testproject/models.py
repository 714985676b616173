"""Accounts and the fees taken from them."""

from __future__ import annotations

from django.db import models

from django_distlock.models import FencedModel


class Account(FencedModel):
    """A customer's money."""

    name = models.CharField(max_length=100)
    opening_balance = models.DecimalField(max_digits=14, decimal_places=2)
    balance = models.DecimalField(max_digits=14, decimal_places=2)

    class Meta:
        ordering = ("pk",)

    def __str__(self) -> str:
        return self.name


class Fee(models.Model):
    """One fee that was charged: the receipt, which no lost update takes back."""

    account = models.ForeignKey(Account, on_delete=models.CASCADE, related_name="fees")
    amount = models.DecimalField(max_digits=14, decimal_places=2)
    charged_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("-pk",)

    def __str__(self) -> str:
        return f"{self.amount} from {self.account_id}"
