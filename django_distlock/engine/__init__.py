"""The machinery of locks; private to this package.

Comments here call an exception *asynchronous* if a signal handler or another thread raises it, so that it
can come at any line: Ctrl-C, or Celery's soft time limit.
"""
