"""What every embedder promises, and what embedders of all kinds share."""
