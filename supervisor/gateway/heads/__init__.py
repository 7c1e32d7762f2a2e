"""Heads of HTTP requests: the fast reader of plain heads, and the checks of hosts and origins."""
