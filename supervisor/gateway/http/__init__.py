"""HTTP clients of the gateway: their connections, and the routes that answer their requests."""
