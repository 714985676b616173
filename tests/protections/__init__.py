"""Each protection of the code, how it is taken out, and the tests that must fail without it."""
