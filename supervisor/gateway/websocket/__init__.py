"""WebSocket clients of the gateway, in the Responses mode: sessions, lanes, and the history of each lane."""
