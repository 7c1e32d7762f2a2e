"""The part of a node that clients connect to: HTTP and WebSocket on one port, keys, admission and limits."""
