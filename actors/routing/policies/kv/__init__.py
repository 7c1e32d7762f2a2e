"""The policy `kv`: which worker has most of a prompt in its prefix cache, at which load."""
