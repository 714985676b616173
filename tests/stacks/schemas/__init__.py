"""A project with a schema for each tenant, as django-tenants documents it."""
