"""Strict structuring of untrusted data: every mistake is reported at once, with its path in the data."""
