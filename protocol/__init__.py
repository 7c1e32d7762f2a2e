"""Messages, errors, protocol rules and API dialects: pure data and state machines, without I/O, clocks or tasks.

This room has everything that two programs must agree on, and nothing else. `messages/` are the messages between nodes
and engine hosts, `link/` is their transport. `strict/` reads untrusted data, `dialects/` are the APIs of clients, and
`openapi/` describes them. A file here may read no clock, file or environment, draw no random number, and import neither
Trio nor asyncio, so all of it can be tested exhaustively and run in any process.
"""
