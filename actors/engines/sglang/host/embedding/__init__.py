"""The host of an engine that computes vectors or scores, and its changes to SGLang's scheduler."""
