"""Messages, errors, protocol rules and API dialects: pure data and state machines, without I/O, clocks or tasks."""
