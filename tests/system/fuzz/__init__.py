"""Hostile inputs for HTTP and WebSocket, each made from its number alone, and the checks of every response."""
