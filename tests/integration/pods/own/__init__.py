"""An app that overrides ``migrate``."""
