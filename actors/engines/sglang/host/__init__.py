"""One SGLang engine in a process of its own, behind a link to its node: asyncio, threads and SGLang live here alone."""
