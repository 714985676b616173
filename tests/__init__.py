"""The tests."""

import testproject  # noqa: F401 - which picks the drivers
