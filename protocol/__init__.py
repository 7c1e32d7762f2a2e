"""Messages, errors, protocol rules and API dialects: pure data and state machines, without I/O, clocks or tasks.

Whatever two programs must agree on stands here, and nothing that only one of them needs. `messages/` are what nodes and
engine hosts send each other, and `link/` is how. `strict/` reads untrusted data, `dialects/` are the APIs of clients,
and `openapi/` describes them. A file here may read no clock, file or environment, draw no random number, and import
neither Trio nor asyncio, so that all of it can be tested exhaustively and run in any process.
"""
