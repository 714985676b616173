"""An app whose migrations write down who runs them, and go on when they are told."""
