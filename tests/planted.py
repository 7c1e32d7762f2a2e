"""The bugs that `tests.mutants` plants, one at a time: what stands in the code, and what stands there instead."""

from __future__ import annotations

from attrs import frozen


@frozen
class Mutant:
    """One planted bug."""

    name: str
    path: str
    old: str
    new: str
    harmless: str = ""  # why nothing need notice it


KIT, DECODE, LINK = "actors/_kit.py", "actors/decode.py", "supervisor/link.py"
LIMITS = "actors/engines/limits.py"
ADAPTER, STREAMS, FRAMES = "actors/engines/sglang/adapter.py", "protocol/streams.py", "protocol/frames.py"

LINKS = (
    Mutant(
        "the asker's answer is dropped before its call is cancelled",
        KIT,
        """            call.scope.cancel(reason="the asker left")
            call.answer.enough()
""",
        """            call.answer.enough()
            call.scope.cancel(reason="the asker left")
""",
        harmless="both happen in one turn, and what is put in between is dropped either way",
    ),
    Mutant("leaving does not cancel the answerer", KIT, 'call.scope.cancel(reason="the asker left")', "pass"),
    Mutant(
        "an answerer that ends leaves its asker waiting",
        KIT,
        'self.answer.fail(ActorLost("whoever was answering ended"))',
        "pass",
    ),
    Mutant(
        "a relay ignores the replies that waited",
        KIT,
        "self._deliver(self._waiting.popleft())",
        "self._waiting.popleft()",
    ),
    Mutant("the credit of an answer is not counted", KIT, "self.credit -= units", "pass"),
    Mutant("an error in a relay's function reaches whoever put", KIT, "self._broken = error\n", "raise\n"),
    Mutant("the first reply does not renew a relay's deadline", KIT, "self._first_wakes = until is not None", "pass"),
    Mutant("bugs are never too many", KIT, "if len(self._seen) > self.most:", "if False:"),
    Mutant(
        "an actor's error beside a request's is forgotten",
        KIT,
        "if _first(error, ActorError) is not None:",
        "if failure is None and _first(error, ActorError) is not None:",
    ),
    Mutant("no abort", DECODE, "engine.abort(request.id)", "pass"),
    Mutant("abort without waiting for the slot", DECODE, "await engine.wait_released(request.id)", "pass"),
    Mutant(
        "an unshielded wait for the slot", DECODE, "move_on_after(release_s, shield=True)", "move_on_after(release_s)"
    ),
    Mutant("an engine that keeps a slot is forgiven", DECODE, "if waiting.cancelled_caught:", "if False:"),
    Mutant(
        "a slot is lost with each request that is left",
        DECODE,
        "        free.release()",
        "        if not call.scope.cancel_called:\n            free.release()",
    ),
    Mutant("work is begun for an asker who left", DECODE, "await trio.lowlevel.checkpoint_if_cancelled()", "pass"),
    Mutant(
        "a call is taken before there is a slot for it",
        DECODE,
        """            await free.acquire()  # the slot first: a call that must wait had better wait where others can take it
            call = await inbox.receive()
""",
        """            call = await inbox.receive()
            await free.acquire()
""",
    ),
    Mutant(
        "no deadline for the first token",
        DECODE,
        "self.started_at + self.deadlines.first_token_s)",
        "self.started_at + 1e9)",
    ),
    Mutant(
        "no deadline between tokens", DECODE, "return min(total, self.last_at + self.deadlines.gap_s)", "return total"
    ),
    Mutant("no Cancel frame on leaving", LINK, 'self._send(Cancel(stream, "the asker left"))', "pass"),
    Mutant("a stream is closed before its answerer let go", LINK, "if serving.answer is not None:\n", "if False:\n"),
    Mutant(
        "a Cancel from the other end is ignored", LINK, 'serving.scope.cancel(reason=f"peer: {frame.reason}")', "pass"
    ),
    Mutant("a lost link forgets its askers", LINK, 'answer.fail(self.lost_as("the link went down"))', "pass"),
    Mutant("a closed stream wakes nobody who waits for one", LINK, "self._permits.unpark()\n", "pass\n"),
    Mutant(
        "Hello wakes nobody who asked before it",
        LINK,
        """                    self._permits.unpark_all()
                    task_status""",
        "                    task_status",
    ),
    Mutant(
        "an End that lies loses its asker",
        LINK,
        """                result = messages.decode(frame.body) if frame.body else None
                self._closed(frame.stream).end(result)
""",
        "                self._closed(frame.stream).end(messages.decode(frame.body))\n",
    ),
    Mutant(
        "the end of a link is told when its answerers have let go",
        LINK,
        """                finally:
                    self._end()  # at once: the tasks that serve may take their time, and must not send any more
                nursery""",
        """                nursery""",
    ),
    Mutant("credit that comes while the inbox is full is lost", LINK, "answer.credit += serving.granted", "pass"),
    Mutant(
        "nothing limits what a sleeping peer leaves unread",
        LINK,
        "self.peer.queued_bytes > self.queued_bytes_max",
        "False",
    ),
    Mutant("the writer stops after its first message", LINK, "await self._writer.park()", "return"),
    Mutant(
        "a Step loses the tokens of an answer's last step",
        LINK,
        "        for stream, ids in step.pieces():\n",
        """        ended_now = {end.stream for end in step.ended}
        for stream, ids in step.pieces():
            if stream in ended_now:
                continue
""",
    ),
    Mutant(
        "the adapter forgets which stream a request has",
        ADAPTER,
        "self._streams[request.id] = stream, generation",
        "pass",
    ),
    Mutant("the adapter never forgets a request", ADAPTER, "self._streams.pop(request_id, None)", "pass"),
    Mutant("an empty prompt reaches the engine", LIMITS, "if not request.tokens:", "if False:"),
    Mutant(
        "one token too many reaches the engine",
        LIMITS,
        "if total > info.request_tokens_max:",
        "if total > info.request_tokens_max + 1:",
    ),
    Mutant("replies after a Cancel are a violation", STREAMS, '"leaving": {Item: "leaving", End', '"leaving": {End'),
    Mutant(
        "a Cancel that crosses an End is a violation",
        STREAMS,
        '"closed": {Credit: "closed", Cancel: "closed"}',
        '"closed": {Credit: "closed"}',
    ),
    Mutant("a left stream is forgotten at once", STREAMS, "self._leaving.add(stream)", "self._close(stream)"),
    Mutant("credit may go below zero", STREAMS, "if not 0 <= units <= left:", "if False:"),
    Mutant(
        "a Step's arrays are not compared",
        STREAMS,
        "if len(frame.streams) != len(frame.counts) or sum(frame.counts) != len(frame.tokens):",
        "if False:",
    ),
    Mutant("more streams than a peer serves", STREAMS, "if len(self._credit) >= self.open_max:", "if False:"),
    Mutant("half a frame is read as a whole one", FRAMES, "if size - body < length:", "if size - body < length - 1:"),
    Mutant("bytes stay behind in the buffer", FRAMES, "del buffer[:at]", "del buffer[: max(at - 1, 0)]"),
    Mutant(
        "deep nesting breaks the decoder",
        "protocol/messages.py",
        "UnicodeDecodeError, RecursionError)",
        "UnicodeDecodeError)",
    ),
)
