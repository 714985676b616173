"""What other processes do in the tests of locks in a database; see tests.fixtures.child."""

from __future__ import annotations
