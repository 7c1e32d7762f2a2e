"""The launcher: the nodes of one host, each a process of its own, started and stopped together."""
