"""The encoder port, and what every encoder shares: its queue, its limits and the cache of embeddings."""
