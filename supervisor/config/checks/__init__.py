"""Checks between keys of the configuration."""
