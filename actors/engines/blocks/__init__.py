"""The blocks of an engine's prefix cache: the log of their changes, and how a reader follows it."""
