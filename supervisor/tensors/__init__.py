"""Tensors in memory that a node shares with the processes of its engines."""
