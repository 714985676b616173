"""The lease, its renewal, the claim and the fenced write, as a model that Spin searches completely."""
