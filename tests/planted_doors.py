"""More bugs to plant: those between a client's socket and the workers."""

from __future__ import annotations

from tests.planted import Mutant

CHOICES, READING, SCORES = "actors/_text/choices.py", "actors/_text/reading.py", "actors/_text/scores.py"
PROMPTS, PROCESSOR = "actors/_text/prompts.py", "actors/processor.py"
GATE, OUTBOX, HTTP, EXCHANGE = (f"supervisor/doors/{name}.py" for name in ("gate", "outbox", "http", "exchange"))
ASKING, LANES, MEMORY, SOCKET = (f"supervisor/doors/{name}.py" for name in ("asking", "lanes", "memory", "websocket"))
ANSWERING, GATEWAY, NODE = "supervisor/doors/routes/answering.py", "supervisor/gateway.py", "supervisor/node.py"
DOOR, CHAT, EVENTS = "supervisor/doors/door.py", "protocol/dialects/chat.py", "protocol/dialects/responses_events.py"

TEXT = (
    Mutant(
        "the last text of an answer is dropped",
        CHOICES,
        "        if (text := reading.finish()) is not None:\n            speak(text)\n",
        "        reading.finish()\n",
    ),
    Mutant(
        "the engine is not told that a stop string has come",
        CHOICES,
        "generation.enough()  # leaving aborts",
        "pass  # leaving aborts",
    ),
    Mutant(
        "usage counts the tokens of the last choice only",
        CHOICES,
        "self._completion += finished.usage.completion_tokens",
        "self._completion = finished.usage.completion_tokens",
    ),
    Mutant(
        "usage counts a token after the stop string",
        CHOICES,
        "self._completion += reading.tokens",
        "self._completion += reading.tokens + 1",
    ),
    Mutant(
        "usage counts the prompt once a choice",
        CHOICES,
        "sum(len(of_prompt[0].tokens) for of_prompt in asked)",
        "sum(len(each.tokens) for of_prompt in asked for each in of_prompt)",
    ),
    Mutant(
        "a stop string reads as the longest length",
        CHOICES,
        "speak(ChoiceEnded(FinishReason.STOP, choice, reading.matched))",
        "speak(ChoiceEnded(FinishReason.LENGTH, choice, reading.matched))",
    ),
    Mutant(
        "choices are told under one number",
        CHOICES,
        "nursery.start_soon(self._choice, generate, first + place, speak, place == 0)",
        "nursery.start_soon(self._choice, generate, first, speak, place == 0)",
    ),
    Mutant("choices share their seed", PROMPTS, "evolve(sampling, seed=sampling.seed ^ choice)", "sampling"),
    Mutant("choices share their id", PROMPTS, "if choice else request_id", "if False else request_id"),
    Mutant("a stop string leaks", READING, "text[: end if self.stop_included else at]", "text[:end]"),
    Mutant("the start of a stop string leaks", READING, "keep = self._possible_start(text)", "keep = 0"),
    Mutant(
        "what may be a stop string is forgotten",
        READING,
        "text, self._held = text[:-keep], text[-keep:]",
        "text = text[:-keep]",
    ),
    Mutant("half a character is told", READING, "if not text.endswith(BROKEN):", "if True:"),
    Mutant("what a choice held back is lost", READING, "            out += self._held\n", "            pass\n"),
    Mutant("text is lost behind a stop token", READING, "out += self._held + self._decoding.flush()", "pass"),
    Mutant(
        "the log probability of a text's last token is lost",
        SCORES,
        "self._pending[0].end <= self._told:",
        "self._pending[0].end < self._told:",
    ),
    Mutant("log probabilities that are left are lost", SCORES, "        if last:\n", "        if False:\n"),
    Mutant("a processor's permit leaks", PROCESSOR, "            free.release()\n", "            pass\n"),
    Mutant(
        "log probabilities are told to nobody in chunks",
        CHAT,
        "_encode(_logprobs(reply.logprobs))",
        'b"null"',
    ),
)

DOORS = (
    Mutant("a place at the gate leaks", GATE, "        self.inside -= 1\n", "        pass\n"),
    Mutant(
        "a place that is given to one who has left leaks",
        GATE,
        "            if waiter.has_place and not admitted:\n                self._leave()\n            elif",
        "            if waiter.has_place:\n                pass\n            elif",
    ),
    Mutant(
        "whoever leaves the line stays in it",
        GATE,
        "                self._line.remove(waiter)\n",
        "                pass\n",
    ),
    Mutant("nobody waits at the gate", GATE, "if not self._line and self.inside < self.requests_max:", "if True:"),
    Mutant(
        "those who wait never hear of a drain",
        GATE,
        "        for waiter in self._line:\n            waiter.woken.set()\n",
        "",
    ),
    Mutant(
        "what a socket does not take at once is lost", OUTBOX, "            self._park(rest)\n", "            pass\n"
    ),
    Mutant(
        "a frame goes past those that wait",
        OUTBOX,
        "        if self._rest:\n            if self.backlog",
        "        if False:\n            if self.backlog",
    ),
    Mutant(
        "a backlog is never full", OUTBOX, "if self.backlog_bytes + len(data) > self.backlog_bytes_max:", "if False:"
    ),
    Mutant("a farewell tears a frame", OUTBOX, "del self._rest[self._begun :]", "del self._rest[:]"),
    Mutant("a client that leaves is answered to the end", HTTP, 'answering.cancel(reason="the client left")', "pass"),
    Mutant(
        "what is asked ahead is lost",
        HTTP,
        "                self._syntax.receive_data(bytes(data))\n        self.outbox",
        "                pass\n        self.outbox",
    ),
    Mutant(
        "an answer that was cut ends as a whole one",
        EXCHANGE,
        "        farewell(self._data(events))\n        self.syntax.send_failed()\n",
        "        farewell(self._data(events) + self._end())\n",
    ),
    Mutant(
        "an error in the middle of a stream is swallowed",
        ANSWERING,
        "exchange.cut(chunks.failed(error), error)",
        'exchange.cut(b"", error)',
    ),
    Mutant(
        "a stream that failed says that it is done",
        ANSWERING,
        "exchange.cut(chunks.failed(error), error)",
        'exchange.finish(b"data: [DONE]\\n\\n")',
    ),
    Mutant("no deadline for all of an answer", ASKING, "trio.move_on_after(self.total_s)", "trio.move_on_after(1e9)"),
    Mutant(
        "a door waits for ever for a first token", ASKING, "if counted.first_at is None else inf", "if False else inf"
    ),
    Mutant(
        "a response is cut and nobody hears why",
        ASKING,
        "            raise self.cut\n",
        "            pass\n",
    ),
    Mutant(
        "a cancel ends the response of another lane",
        LANES,
        "in_lane = event.stream_id == running.create.stream_id",
        "in_lane = True",
    ),
    Mutant(
        "one that is cancelled while it waits is answered all the same",
        LANES,
        "        self._waiting.remove(waiting)\n        ours",
        "        ours",
    ),
    Mutant(
        "lanes wait for each other",
        LANES,
        "if lane not in taken and waiting.parent is None:",
        "if not taken and waiting.parent is None:",
    ),
    Mutant(
        "a lane answers two at once",
        LANES,
        "if lane not in taken and waiting.parent is None:",
        "if waiting.parent is None:",
    ),
    Mutant(
        "what was said before is forgotten", LANES, "history = () if before is None else before.turns", "history = ()"
    ),
    Mutant(
        "a response that ended keeps its lane",
        LANES,
        "        self._advance()\n        self._perhaps_rest()\n\n    def _perhaps_rest",
        "        self._perhaps_rest()\n\n    def _perhaps_rest",
    ),
    Mutant(
        "instructions outlive their request",
        MEMORY,
        "return cls(response_id, before.turns + turns,",
        "return cls(response_id, turns + before.turns,",
    ),
    Mutant(
        "a delta is told twice",
        EVENTS,
        "        self._pieces.append(reply.text)\n",
        "        self._pieces.append(reply.text * 2)\n",
    ),
    Mutant(
        "a response's usage is another's",
        EVENTS,
        '"output_tokens": usage.completion_tokens',
        '"output_tokens": usage.prompt_tokens',
    ),
    Mutant(
        "a WebSocket client that leaves is answered to the end",
        SOCKET,
        'self._scope.cancel(reason="the client left")',
        "pass",
    ),
    Mutant("a connection is never forgotten", DOOR, "        del self.connections[outbox]\n", "        pass\n"),
    Mutant("a drain cuts nothing", NODE, "if cut := door.cut():", "if cut := 0:"),
    Mutant("a drain lets new requests in", DOOR, "        self.gate.drain()\n", "        pass\n"),
)
