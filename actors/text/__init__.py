"""The processor's trade: a model's text side as pure functions and small values."""
