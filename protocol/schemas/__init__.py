"""JSON schemas of clients: what an engine can be held to, and the same schema as the engine understands it."""
