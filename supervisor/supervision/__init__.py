"""Supervision trees: children as values, restarts by strategy, events, status, and registered names."""
