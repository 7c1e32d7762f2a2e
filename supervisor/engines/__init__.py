"""Engines as children of a node's tree: what each kind of engine adds to `cluster.toml` and to a node."""
