"""The policy `kv`: workers compared by the cached part of a prompt and by their loads."""
