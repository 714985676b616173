"""The template tag edit_lock, for a page with the form of an object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django import template

if TYPE_CHECKING:
    from django_distlock.contrib.editing import EditLock

register = template.Library()


@register.inclusion_tag("django_distlock/edit_lock.html")
def edit_lock(edit: EditLock) -> dict[str, Any]:
    """Show who edits the object, and renew its lock while the page is open; to be used inside its form."""
    edit.is_shown = True
    return {"edit": edit}
