"""More bugs to plant: those between a client's socket and the workers."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "supervisor/gateway/outbox.py": (
        Bug(
            "bytes that a socket does not take at once are lost",
            "            self._append(rest)\n",
            "            pass\n",
        ),
        Bug(
            "a frame overtakes those in the backlog",
            "        if self._frames:\n            more, own",
            "        if False:\n            more, own",
        ),
        Bug("a backlog is never full", "if own + more > self.backlog_bytes_max or not", "if False and not"),
        Bug(
            "the last bytes of a connection tear a frame",
            "del self._frames[self._begun_frames :]",
            "del self._frames[:]",
        ),
    ),
    "supervisor/gateway/http/connection.py": (
        Bug(
            "the WebSocket library reads whatever a client puts into its handshake",
            "raw = handshake_bytes(exchange) + self._reader.trailing_bytes",
            'raw = bytes(self._reader._head or b"")',
        ),
    ),
    "supervisor/gateway/http/request_reader.py": (
        Bug("any number of headers is read", "        if count > HEADERS_MAX:", "        if False:"),
        Bug("a client that leaves is answered to the end", 'answering.cancel(reason="the client left")', "pass"),
        Bug(
            "pipelined requests are lost",
            "                self.syntax.receive_data(bytes(data))\n        self.outbox",
            "                pass\n        self.outbox",
        ),
    ),
    "supervisor/gateway/http/exchange.py": (
        Bug(
            "a response that was cut ends as a complete one",
            "            self.outbox.put(self._data(events))\n        elif",
            "            self.outbox.put(self._data(events) + self._end())\n            return\n        elif",
        ),
    ),
    "supervisor/gateway/http/routes/answering.py": (
        Bug(
            "events that wait are accounted as tokens",
            "            memory.grow(max(0, waiting_bytes",
            "            max((0, waiting_bytes",
        ),
        Bug(
            "an error in the middle of a stream is swallowed",
            "exchange.abort_stream(chunks.failed(error), error)",
            'exchange.abort_stream(b"", error)',
        ),
        Bug(
            "a stream that failed ends with [DONE]",
            "exchange.abort_stream(chunks.failed(error), error)",
            'exchange.finish(b"data: [DONE]\\n\\n")',
        ),
    ),
    "supervisor/gateway/requests.py": (
        Bug("a response has no deadline", "trio.move_on_at(record.received_at + self.total_s)", "trio.move_on_at(1e9)"),
        Bug("the first token has no deadline", "if record.first_at is None else inf", "if False else inf"),
        Bug("a response is aborted without its error", "            raise self.aborted_by\n", "            pass\n"),
    ),
    "supervisor/gateway/websocket/lanes.py": (
        Bug(
            "the last events of a long response do not wait for their reader",
            "                    await self.outbox.wait_room(size)  # they repeat the text several times\n",
            "",
        ),
        Bug(
            "the last events of a long response wait without reserved memory",
            "memory.grow(size := sum(",
            "(size := sum(",
        ),
        Bug(
            "a cancel ends the response of another lane",
            "in_lane = event.stream_id == running.request.stream_id",
            "in_lane = True",
        ),
        Bug(
            "a request that is cancelled while it waits is answered",
            "        self._waiting.remove(waiting)\n        waiting.memory.release()\n        response_id",
            "        waiting.memory.release()\n        response_id",
        ),
        Bug(
            "lanes wait for each other",
            "if lane not in taken and waiting.parent is None:",
            "if not taken and waiting.parent is None:",
        ),
        Bug(
            "a lane answers two requests at once",
            "if lane not in taken and waiting.parent is None:",
            "if waiting.parent is None:",
        ),
        Bug(
            "a continued conversation is forgotten",
            "history = () if previous is None else previous.turns",
            "history = ()",
        ),
        Bug(
            "a response that ended keeps its lane",
            "        self._start_waiting()\n        self._check_idle()\n\n    def _check_idle",
            "        self._check_idle()\n\n    def _check_idle",
        ),
    ),
    "supervisor/gateway/websocket/history.py": (
        Bug(
            "instructions outlive their request",
            "return cls(response_id, previous.turns + turns,",
            "return cls(response_id, turns + previous.turns,",
        ),
    ),
    "protocol/dialects/responses/events.py": (
        Bug(
            "a delta is sent twice",
            "        self._pieces.append(reply.text)\n",
            "        self._pieces.append(reply.text * 2)\n",
        ),
    ),
    "protocol/dialects/responses/objects.py": (
        Bug(
            "a response's usage is another's",
            '"output_tokens": usage.completion_tokens',
            '"output_tokens": usage.prompt_tokens',
        ),
    ),
    "supervisor/gateway/websocket/session.py": (
        Bug(
            "a WebSocket client that leaves is answered to the end",
            'self._scope.cancel(reason="the client left")',
            "pass",
        ),
    ),
    "supervisor/gateway/websocket/replayed_stream.py": (
        Bug(
            "all frames behind a handshake are read in one turn",
            "self._frames.feed(self._unread[:max_bytes], FRAMES_A_TURN)",
            "self._frames.feed(self._unread, len(self._unread))",
        ),
    ),
    "supervisor/gateway/connections.py": (
        Bug("a connection is never forgotten", "        self._open.pop(outbox, None)\n", ""),
    ),
    "supervisor/gateway/gateway.py": (
        Bug("a drain lets new requests in", "        self.gate.drain()\n", "        pass\n"),
    ),
    "supervisor/node/node.py": (
        Bug("a drain that takes too long aborts nothing", "if cut := assembly.gateway.abort():", "if cut := 0:"),
    ),
}
