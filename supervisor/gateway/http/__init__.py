"""HTTP clients of the gateway: connections, exchanges, and the routes that answer them."""
