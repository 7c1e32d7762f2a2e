"""One node: a process with one supervision tree, assembled from the configuration of its cluster."""
