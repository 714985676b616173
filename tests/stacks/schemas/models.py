from django_tenants.models import DomainMixin, TenantMixin


class Client(TenantMixin):
    auto_create_schema = False


class Domain(DomainMixin):
    pass
