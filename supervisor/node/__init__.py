"""One node: a process with one supervision tree, assembled from the description of its cluster."""
