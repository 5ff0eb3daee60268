"""A directory for the module search path of processes that a program under `run` starts."""
