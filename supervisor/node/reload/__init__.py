"""The reload of the configuration while a node runs: what changed, and what may."""
