"""The costs of a real engine's steps, measured from outside, for a simulated one."""
