"""The description of a cluster, cluster.toml: its schema, its strict reading, and every mistake in it with its line."""
