"""Bugs to plant in calls between actors, in streams and in links."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "actors/kit/direct.py": (
        Bug("an actor ends without its direct calls", 'call.scope.cancel(reason="the actor ends")', "pass"),
        Bug("an actor does not wait for its direct calls", "while self._running:", "while False:"),
        Bug("a bug too many in a direct call does not reach its actor", "nursery.start_soon(_raise, error)", "pass"),
        Bug(
            "whoever takes no more replies waits for the end of a direct call",
            'self.call.scope.cancel(reason="the asker takes no more replies")',
            "pass",
        ),
        Bug("a direct call is put in front of calls that wait", "not self.pass_by(request)", "False"),
        Bug("a direct call is not over when its asker leaves", "self.sent or not self.over.is_set()", "self.sent"),
    ),
    "actors/router.py": (
        Bug(
            "a router takes a call from its inbox for which a direct one has left no room",
            "        if routing.has_room(request):\n",
            "        if True:\n",
        ),
    ),
    "actors/kit/calls.py": (
        Bug(
            "a bug beside the error of a request is not counted",
            "if not consists_of(error, RequestError):",
            "if failure is None:",
        ),
        Bug(
            "the asker's answer is dropped before its call is cancelled",
            """        self.scope.cancel(reason="the asker left")
        self.answer.abandon()
""",
            """        self.answer.abandon()
        self.scope.cancel(reason="the asker left")
""",
            harmless="both happen in one turn, and what is put in between is dropped either way",
        ),
        Bug("leaving does not cancel the call", 'self.scope.cancel(reason="the asker left")', "pass"),
        Bug(
            "a service that ends leaves its asker waiting",
            'self.answer.fail(ActorLost("the actor that was answering has ended"))',
            "pass",
        ),
        Bug(
            "a relay ignores the replies that waited",
            "self._deliver(self._waiting.popleft())",
            "self._waiting.popleft()",
        ),
        Bug("the credit of an answer is not counted", "self.credit -= units", "pass"),
        Bug(
            "an error in a relay's function is raised where a reply is put",
            "            self.fail_relay(error)\n",
            "            raise\n",
        ),
        Bug("the first reply does not renew a relay's deadline", "self._first_wakes = until is not None", "pass"),
        Bug("an actor is never ended for its bugs", "if len(self._times) > self.bugs_max:", "if False:"),
        Bug(
            "an actor's error beside a request's is forgotten",
            "if first_of(error, ActorError) is not None:",
            "if failure is None and first_of(error, ActorError) is not None:",
        ),
    ),
    "actors/engines/slots.py": (
        Bug("no abort", "self.engine.abort(request.id)", "pass"),
        Bug("abort without waiting for the slot", "await self.engine.wait_released(request.id)", "pass"),
        Bug(
            "an unshielded wait for the slot",
            "move_on_after(self.deadlines.release_s, shield=True)",
            "move_on_after(self.deadlines.release_s)",
        ),
        Bug(
            "an engine that does not release a slot is not ended",
            "if waiting.cancelled_caught:\n                self.stuck",
            "if False:\n                self.stuck",
        ),
        Bug(
            "a slot is lost with each request that is left",
            "    slots.end_request()",
            "    if not call.scope.cancel_called:\n        slots.end_request()",
        ),
        Bug(
            "work is begun for an asker that has left",
            "        await trio.lowlevel.checkpoint_if_cancelled()\n        request = ",
            "        request = ",
        ),
        Bug(
            "no deadline for the first token",
            "self.began_at + self.deadlines.first_token_s)",
            "self.started_at + 1e9)",
        ),
        Bug("no deadline between tokens", "return min(total, self.last_at + self.deadlines.gap_s)", "return total"),
    ),
    "actors/decode.py": (
        Bug(
            "a call is taken before there is a slot for it",
            """        await slots.free.acquire()  # first, so that a call waits where others can take it
        call = await inbox.receive(fits, group)
""",
            """        call = await inbox.receive(fits, group)
        await slots.free.acquire()
""",
        ),
    ),
    "supervisor/links/link.py": (
        Bug("why a node drains may be any text", "bye.detail[:DETAIL_CHARACTERS_MAX]", "bye.detail"),
        Bug("many announcements are merged in one turn", "FRAMES_A_TURN if type(frame) is Announce else 1", "1"),
        Bug("Hello does not wake requests that came before it", "        self._asking.wake()\n", ""),
        Bug(
            "a link ends when the calls that it serves have been released",
            """                finally:
                    self._end(reason)  # at once: calls that are served may run on, and must not send any more
                nursery.cancel_scope.cancel(reason="the link has ended")
""",
            """                finally:
                    nursery.cancel_scope.cancel(reason="the link has ended")
            self._end(reason)
""",
        ),
    ),
    "supervisor/links/frame_writer.py": (
        Bug("nothing limits what a peer leaves unread", "self.peer.queued_bytes > self.queued_bytes_max", "False"),
        Bug("the writer stops after its first message", "await self._waiting.park()", "return"),
        Bug(
            "a bug of this node goes on as if the frame had been sent",
            "            self.on_failure(error)\n            return\n        self.wake",
            "            return\n        self.wake",
        ),
        Bug(
            "a frame overtakes the tokens that were gathered before it",
            "            self._send_gathered()\n        self._send(frame, attached, share)",
            "            pass\n        self._send(frame, attached, share)",
        ),
        Bug(
            "gathered tokens wake no writer",
            "        if not step.tokens:\n            self.wake()\n",
            "",
        ),
        Bug(
            "a Step has any number of tokens",
            "if len(step.tokens) + len(ids) > STEP_TOKENS_MAX:",
            "if False:",
        ),
    ),
    "supervisor/links/encoding.py": (
        Bug(
            "block events of any size wait for their asker",
            "        rules.body_bytes_max = REPLY_BYTES_MAX\n",
            "        pass\n",
        ),
        Bug(
            "a Step of another node may end an answer",
            "if step.begun or step.ended or step.logprobs:",
            "if False:",
        ),
        Bug("the token ids of a Step are not checked", "if min(step.tokens) < 0 or", "if"),
        Bug("a Step of another node has no limit", "if not 0 < len(step.tokens) <= STEP_TOKENS_MAX or", "if"),
        Bug("tokens of a Step may answer any request", "if not self.takes_tokens:", "if False:"),
        Bug("tokens may come in a Step before their answer has begun", "if not self.begun or", "if"),
        Bug(
            "tokens may come in a Step without the log probabilities that were asked for",
            "if not self.begun or self.likeliest_max is not None:",
            "if not self.begun:",
        ),
        Bug("the first reply may come again, or late", "if self.first is not None and self.begun is", "if False and"),
        Bug("an answer may end before it has begun", "if not self.begun:\n", "if False:\n"),
        Bug(
            "the tensors of a result may come for any request",
            " or item.units or self.result not in codec.WITH_TENSORS:",
            " or item.units:",
        ),
        Bug("replies may follow the tensors of a result", "if self.attached is not None:\n", "if False:\n"),
        Bug("the embeddings of another item are taken", "_identity(result.item) != _identity(self.item)", "False"),
        Bug("any number of likeliest tokens may come", "len(each.top) > self.likeliest_max", "False"),
        Bug("log probabilities may be left out", "len(tokens.logprobs) != len(ids) or ", ""),
        Bug("another node may count any number of tokens", " or usage.completion_tokens > self.tokens_max:", ":"),
        Bug("a grammar may be refused by any text", "len(result.refusal) > DETAIL_CHARACTERS_MAX", "False"),
        Bug("what ended an answer may be any text", "len(matched) > MATCHED_CHARACTERS_MAX", "False"),
        Bug("another node may say what only a gateway may", "RequestError).of_gateway:", "RequestError) is None:"),
    ),
    "protocol/peer.py": (
        Bug(
            "a Step overtakes an attachment",
            "return (False, stream) not in self._outgoing.unsent and not self.served.owed(stream)[1]",
            "return True",
        ),
        Bug("a node of an older version is sent a Step", " or not self.hello.takes_steps:", ":"),
        Bug(
            "a request without tensors is refused while others wait for room",
            "and size and share is None",
            "and share is None",
        ),
        Bug(
            "a reply takes room that somebody waits for",
            "(not size or self._outgoing.budget.fits(size))",
            "True",
        ),
        Bug("a sender ignores its receiver's limit", "self._outgoing.budget.bytes_max = hello.attached_bytes_max", ""),
    ),
    "protocol/attachments.py": (
        Bug(
            "room is given back before the last piece has been sent",
            "            del self._turns[key]\n        return key, data\n",
            "            del self._turns[key]\n            self.piece_sent(key)\n        return key, data\n",
        ),
    ),
    "protocol/byte_budget.py": (
        Bug("small shares overtake a large one that waits", "return not self._waiting and self", "return self"),
        Bug("whoever stops waiting keeps the others waiting", "self._waiting.remove(share)\n", "return\n"),
    ),
    "supervisor/links/waiting.py": (
        Bug(
            "an asker that leaves keeps its room",
            "            share.give_back()\n            on_left()\n",
            "            pass\n",
        ),
        Bug(
            "nobody writes what follows an asker that has left",
            "            share.give_back()\n            on_left()\n",
            "            share.give_back()\n",
        ),
    ),
    "supervisor/links/serving.py": (
        Bug("a stream is closed before its call is released", "if not call.answer.over.is_set():\n", "if False:\n"),
        Bug("a Cancel from the other end is ignored", 'call.scope.cancel(reason=f"peer: {frame.reason}")', "pass"),
        Bug("credit that comes while the inbox is full is lost", "answer.credit += call.granted", "pass"),
        Bug("the last request of a burst is asked first", "self._unasked.popleft()", "self._unasked.pop()"),
    ),
    "supervisor/links/asking.py": (
        Bug("who asks later overtakes who waits for a stream", "bool(self._permits or self._woken)", "False"),
        Bug(
            "those that wait for a stream are woken together",
            "self._permits and not self._woken and",
            "self._permits and",
        ),
        Bug("who asks has a free stream that is another's", "self._unsent + self._woken <", "self._unsent <"),
        Bug(
            "an asker has its answer a turn after its request has left",
            "            self.wake()\n        try:\n",
            "            self.wake()\n        try:\n            await trio.lowlevel.checkpoint()\n",
        ),
        Bug("requests of one turn leave in any order", "trio.lowlevel.checkpoint_if_cancelled()", "trio.sleep(0)"),
        Bug("no Cancel frame on leaving", 'self.writer.send(Cancel(stream, "the asker left"))', "pass"),
        Bug(
            "a lost link does not fail its askers",
            "            answer.fail(self.lost_error(detail))\n",
            "            pass\n",
        ),
        Bug(
            "a closed stream wakes no request that waits for one",
            "stream, 0), None)\n        self.wake()\n",
            "stream, 0), None)\n",
        ),
        Bug(
            "an End that breaks the rules does not fail its asker",
            "        rules.end(result)\n",
            "",
        ),
        Bug(
            "a result whose tensors crossed a Cancel ends the link",
            "if end.stream in self._left and rules.result in codec.WITH_TENSORS:",
            "if False:",
        ),
        Bug(
            "a Step loses the tokens of an answer's last step",
            "        for stream, ids in step.pieces():\n",
            """        ended_now = {end.stream for end in step.ended}
        for stream, ids in step.pieces():
            if stream in ended_now:
                continue
""",
        ),
    ),
    "actors/engines/sglang/adapter.py": (
        Bug("the adapter forgets which stream a request has", "self._streams[request.id] = stream, generation", "pass"),
        Bug("the adapter never forgets a request", "self._streams.pop(request_id, None)", "pass"),
    ),
    "actors/engines/request_check.py": (
        Bug("an empty prompt reaches the engine", "if not request.tokens:", "if False:"),
        Bug(
            "a least length beside a grammar reaches the engine",
            "if wanted.tokens_min and wanted.grammar is not None:",
            "if False:",
        ),
        Bug(
            "one token too many reaches the engine",
            "if total > info.request_tokens_max:",
            "if total > info.request_tokens_max + 1:",
        ),
    ),
    "protocol/streams.py": (
        Bug("replies after a Cancel are a violation", '"leaving": {Item: "leaving", End', '"leaving": {End'),
        Bug(
            "a Cancel that crosses an End is a violation",
            '"closed": {Credit: "closed", Cancel: "closed", RequestData',
            '"closed": {Credit: "closed", RequestData',
        ),
        Bug("a left stream is forgotten at once", "self._leaving.add(stream)", "self._close(stream)"),
        Bug("credit may go below zero", "if not 0 <= units <= left:", "if False:"),
        Bug("tokens of a Step may be more than their credit", "if not 0 <= count <= left:", "if False:"),
        Bug("tokens of a Step spend no credit", "credit[stream] = left - count", "credit[stream] = left"),
        Bug(
            "a Step's arrays are not compared",
            "if len(frame.streams) != len(frame.counts) or sum(frame.counts) != len(frame.tokens):",
            "if False:",
        ),
        Bug("more streams than a peer serves", "if len(self._credit) >= self.open_max:", "if False:"),
    ),
    "protocol/frames.py": (
        Bug("half a frame is read as a whole one", "if size - body < length:", "if size - body < length - 1:"),
        Bug("bytes stay behind in the buffer", "del buffer[:offset]", "del buffer[: max(offset - 1, 0)]"),
    ),
    "protocol/codec.py": (
        Bug(
            "deep nesting raises an error that nobody handles",
            "UnicodeDecodeError, RecursionError)",
            "UnicodeDecodeError)",
        ),
    ),
}
