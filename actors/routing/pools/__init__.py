"""Pools of workers for requests of different sizes: the grid, and the targets of service."""
