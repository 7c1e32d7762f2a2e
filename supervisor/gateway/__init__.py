"""The doors to the outside: one port for WebSocket and HTTP clients, and what stands around it."""
