"""One TensorRT-LLM engine in a process of its own, behind a link to its node: asyncio and the library live here."""
