"""More bugs to plant: those between a client's socket and the workers."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "supervisor/gateway/outbox.py": (
        Bug(
            "bytes that a socket does not take at once are lost",
            "(taken := self._write(data)) < len(data):\n            self._append(data[taken:])\n",
            "(taken := self._write(data)) < len(data):\n            pass\n",
        ),
        Bug(
            "a client over TLS does not learn that its connection ends",
            "            await stream.send_eof()\n",
            "            if stream is self.stream:\n                await stream.send_eof()\n",
        ),
        Bug(
            "a frame overtakes those in the backlog",
            "        if self._frames:\n            more, own",
            "        if False:\n            more, own",
        ),
        Bug("a backlog is never full", "if own + more > self.backlog_bytes_max or not", "if False and not"),
        Bug(
            "last bytes that no socket took count as sent",
            "            taken = 0 if self._frames else self._write(data)\n",
            "            self.accepted_bytes += len(data)\n"
            "            taken = 0 if self._frames else self._write(data)\n"
            "            self.accepted_bytes -= len(data)\n",
        ),
        Bug(
            "the rest of a long frame is copied at each write",
            "    return left if 2 * len(left) > memoryview(left.obj).nbytes else bytes(left)",
            "    return bytes(left)",
        ),
        Bug(
            "a long frame is kept until all of it is sent",
            "    return left if 2 * len(left) > memoryview(left.obj).nbytes else bytes(left)",
            "    return left",
        ),
        Bug(
            "the last bytes of a connection tear a frame",
            "del self._frames[self._begun_frames :]",
            "del self._frames[:]",
        ),
    ),
    "supervisor/gateway/http/connection.py": (
        Bug(
            "what a client sends right behind its handshake is lost",
            "handshake_of(exchange, self._reader.trailing_bytes)",
            'handshake_of(exchange, b"")',
        ),
        Bug(
            "a connection ends in a drain though its last answer did not say so",
            "if not self._reader.syntax.done or exchange.closes:",
            "if not self._reader.syntax.done or exchange.closes or self.gateway.closes_connections:",
        ),
        Bug(
            "a drain does not wait for the last request of a client that has not been told",
            "self.busy = self.gateway.leaving",
            "self.busy = False",
        ),
        Bug(
            "a drain waits for the first request of a client that may send none any more",
            "return not (self.busy or self._ended) and",
            "return not self.busy and",
        ),
        Bug(
            "a request that comes as its connection ends is answered with a reset",
            "min(ON_ITS_WAY_S, close_s) if self._reader.more_coming else 0.0",
            "0.0",
        ),
    ),
    "supervisor/gateway/http/request_reader.py": (
        Bug(
            "the rest of a request is waited for though all such requests have been refused",
            "deadline\n            self._end_if_refusing()\n",
            "deadline\n",
        ),
        Bug("any number of headers is read", "        if count > HEADERS_MAX:", "        if False:"),
        Bug(
            "a drain forgets the clients that wait between two requests",
            "min(self._idle.deadline, self._idle_since + self.gateway.idle_s)",
            "self._idle.deadline",
        ),
        Bug(
            "a request that begins just before its connection ends for want of one is cut short",
            "            if self.answered:\n",
            "            if False:\n",
        ),
        Bug(
            "a drain cuts short the time for a last request",
            "min(self._idle.deadline, self._idle_since + self.gateway.idle_s)",
            "self._idle_since",
        ),
        Bug(
            "a drain forgets the requests that have been pipelined",
            "self.gateway.idle_s if self.answered and not begun else",
            "self.gateway.idle_s if self.answered else",
        ),
        Bug(
            "the rest of a head that comes late resets the connection, and its answer",
            "            self.more_unread = True\n            raise Unreadable(self._overdue",
            "            raise Unreadable(self._overdue",
        ),
        Bug("a client that leaves is answered to the end", 'answering.cancel(reason="the client left")', "pass"),
        Bug(
            "pipelined requests are lost",
            "                self.syntax.receive_data(bytes(data))\n        self.outbox",
            "                pass\n        self.outbox",
        ),
    ),
    "supervisor/gateway/http/plain_head.py": (
        Bug("of two equal headers the last counts", "if len(values) != len(headers) or not", "if not"),
        Bug("a body in chunks is read as one without a length", 'frozenset({b"transfer-encoding", b', "frozenset({b"),
        Bug(
            "a client that asks for the end of its connection keeps it", '.lower() != b"keep-alive"', '.lower() == b""'
        ),
        Bug("a head has any length", "match is None or match.end() > size_max", "match is None"),
    ),
    "supervisor/gateway/http/syntax.py": (
        Bug(
            "a header can end its line, and begin another",
            'if head.count(b"\\n") != len(lines) - 1 or head.count(b"\\r") != len(lines) - 1:',
            "if False:",
        ),
        Bug(
            "the start of the next request is lost behind a plain one",
            "        del self._received[: plain.left_bytes]\n        plain.left_bytes, plain.read",
            "        self._received.clear()\n        plain.left_bytes, plain.read",
        ),
        Bug("a body that ends early is waited for", "if plain.left_bytes and self._closed:", "if False:"),
        Bug(
            "a body in chunks ends with an empty part of it",
            ' % (len(data), data) if data else b""',
            " % (len(data), data)",
        ),
    ),
    "supervisor/gateway/http/exchange.py": (
        Bug(
            "a response that was cut ends as a complete one",
            "            self.outbox.put(self._data(events))\n        elif",
            "            self.outbox.put(self._data(events) + self._end())\n            return\n        elif",
        ),
        Bug("a client of HTTP/1.0 gets chunks", "self._chunked = CHUNKED in head", "self._chunked = True"),
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
        Bug(
            "a response has no deadline",
            "record.scope.deadline = record.received_at + self.total_s",
            "record.scope.deadline = 1e9",
        ),
        Bug("the first token has no deadline", "min(self.first_token_s, self.total_s)", "self.total_s"),
        Bug("a response is aborted without its error", "            raise record.aborted_by\n", "            pass\n"),
        Bug(
            "a drain that takes too long waits for a conversion",
            "running: tuple[RequestRecord | Conversion, ...] = (*self._running, *self._conversions)",
            "running = tuple(self._running)",
        ),
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
        Bug(
            "the first text opens no item",
            "        opening = () if self.opened else self.open()\n        return (*opening, *map",
            "        self.opened, opening = True, ()\n        return (*opening, *map",
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
            "a bug is not logged whose client is gone",
            "with suppress(trio.BrokenResourceError):  # it is gone already, and",
            "with suppress():  #",
        ),
        Bug(
            "a WebSocket client that leaves is answered to the end",
            'self._scope.cancel(reason="the client left")',
            "pass",
        ),
        Bug(
            "a session that drains does not end with its last response",
            "        if self._draining or now >= self._expires_at:\n",
            "        if now >= self._expires_at:\n",
        ),
        Bug(
            "a session that has expired does not end with its last response",
            "        if self._draining or now >= self._expires_at:\n",
            "        if self._draining:\n",
        ),
        Bug(
            "a session that answers longer than its idle time never looks again",
            "idle_at = max(idle_at, now + limits.websocket_idle_s)",
            "idle_at = inf",
        ),
    ),
    "supervisor/gateway/websocket/client_socket.py": (
        Bug("messages that came together are answered in one turn", "if not has_read:", "if False:"),
        Bug(
            "a violation has no close frame",
            "            self.outbox.put_last(close_frame(",
            "            (close_frame(",
        ),
        Bug(
            "a pong follows a close frame",
            "case Ping() if not self.stream.close_sent:",
            "case Ping():",
        ),
        Bug("a close frame is answered twice", "        if self.stream.close_sent:\n            return\n", ""),
        Bug("a fragment is lost", "self._parts += data.encode()", "self._parts[:] = data.encode()"),
        Bug("fragments are of any length together", "self._size += len(event.data)", "self._size = len(event.data)"),
        Bug(
            "a long message is parsed on when its client has left",
            "        self.stream.end()\n        raise",
            "        raise",
        ),
    ),
    "supervisor/gateway/http/upgrade.py": (
        Bug("a handshake is accepted with another's proof", 'exchange.header(b"sec-websocket-key") + GUID', "GUID"),
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
        Bug(
            "a gateway that has left its port does not wait for first requests",
            "while any(connection.awaited",
            "while all(connection.awaited",
        ),
    ),
    "supervisor/gateway/gateway.py": (
        Bug(
            "a drain forgets the clients between two requests",
            "if self.leaving else 0.0",
            "if self.leaving else self.limits.idle_s",
        ),
        Bug("a drain lets new requests in", "            self.gate.drain()\n", "            pass\n"),
        Bug(
            "the drain of a shared port refuses requests that wait",
            "        if not self.shares_port:\n",
            "        if True:\n",
        ),
        Bug(
            "idle clients of a gateway that leaves its port may ask no more",
            "        await trio.sleep_until(idle_until)",
            "        await trio.lowlevel.checkpoint()",
        ),
        Bug(
            "a gateway counts as ready before it listens at a shared port",
            "if self.shares_port and not self.listens else None",
            "if False else None",
        ),
    ),
    "supervisor/gateway/refusals.py": (
        Bug(
            "a client that is refused keeps its socket",
            "read = 0 if trio.current_time() >= until else _read(kept)",
            "read = _read(kept)",
        ),
        Bug("any number of sockets of refused clients are kept", "self._close(KEPT_MAX if", "self._close(10**6 if"),
        Bug(
            "refused clients take all descriptors",
            "if kept.fileno() < self.descriptors_max - SPARE_DESCRIPTORS",
            "if True",
        ),
        Bug(
            "what refused clients send is read without a limit",
            "if reads >= READS_MAX or not self._kept:",
            "if not self._kept:",
        ),
        Bug("a client that is refused is reset", "socket.socket(fileno=os.dup(fd))", "socket.socket(fileno=fd)"),
    ),
    "supervisor/gateway/server.py": (
        Bug(
            "a client that makes room for others gets no answer",
            "if scope.cancelled_caught and secure is None and not outbox.accepted_bytes:",
            "if False:",
        ),
        Bug(
            "a crowd beyond the limit gets no answer",
            "        if gateway.tls is None:  # a TLS handshake costs more than a request\n",
            "        if False:\n",
        ),
        Bug(
            "a gateway listens at a shared port before it can serve", "                await gateway.wait_ready()\n", ""
        ),
        Bug(
            "a shared port that another has by now is a bug",
            '    except OSError as error:\n        raise StartFailed(f"cannot listen on port',
            '    except EOFError as error:\n        raise StartFailed(f"cannot listen on port',
        ),
        Bug(
            "a shared port is closed with connections in its queue",
            "return EmptiedListener(guarded, bound, take, gateway.reserve, refused, answer)",
            "return guarded",
        ),
    ),
    "supervisor/sockets/shared_port.py": (
        Bug("connections for which no descriptor is left are reset", "self._refuse(raw.accept()[0])", "return"),
        Bug("connections that waited at a closed listener are dropped", "            self.take(", "            str("),
    ),
    "supervisor/gateway/keys.py": (
        Bug(
            "each gateway has the whole rate of a key",
            "self.section.rate_per_s / self.gateways",
            "self.section.rate_per_s",
        ),
    ),
    "supervisor/node/node.py": (
        Bug("a drain that takes too long aborts nothing", "if cut := assembly.gateway.abort():", "if cut := 0:"),
    ),
}
