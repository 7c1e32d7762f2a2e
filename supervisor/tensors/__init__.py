"""Tensors in shared memory of a node and the processes of its engines."""
