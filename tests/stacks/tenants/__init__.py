"""A project with django-tenants, as its documentation says: its models, settings and acts."""
