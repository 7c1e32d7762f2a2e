"""WebSocket clients of the gateway, with the events of the Responses API: sessions, lanes, and their history."""
