"""The demo and the tests' settings in one: accounts, from which a fee is taken."""
