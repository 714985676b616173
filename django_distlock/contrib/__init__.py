"""Integrations of other libraries, one module for each."""
