"""Engines without a model, in the node's own process."""
