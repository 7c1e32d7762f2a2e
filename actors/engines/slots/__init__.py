"""The slots of an engine: admission by KV memory, prompts that share a prefix, and the probe of one slot."""
