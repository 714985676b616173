"""All orders of the statements of a few sessions on real databases: the database backend, driven step by step."""
