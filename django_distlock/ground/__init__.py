"""The ground floor: clocks, names, callers and mutexes. Nothing here knows of locks."""
