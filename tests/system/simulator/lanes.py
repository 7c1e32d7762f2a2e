"""WebSocket clients of the Responses dialect, and the judge of their events."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import trio
from attrs import Factory, define, field

from protocol.dialects.responses import FINAL_EVENTS
from protocol.messages.media import Detail
from tests.rig.gateway import frame
from tests.system.simulator import judge
from tests.system.simulator.clients import GONE, HttpClient, Reader, options
from tests.system.simulator.model import PlannedRequest, draw, whole
from tests.system.simulator.pictures import Content, Picture

CLOSES = {1000: "normal", 1012: "draining", 1013: "slow_client"}


@define(eq=False)
class _Response:
    """One response so far."""

    wanted: PlannedRequest
    lane: str | None
    events: int = 0
    text: str = ""
    end: str | None = None


@define(eq=False)
class Transcript:
    """The events of one connection; each is judged as it comes."""

    may: judge.May
    asked: dict[str, tuple[PlannedRequest, str | None]] = Factory(dict)  # by the name that its metadata carry
    responses: dict[str, _Response] = Factory(dict)  # by the number that all its ids share
    errors: list[str] = Factory(list)
    cancels: Counter[str | None] = Factory(Counter)  # by lane
    close_code: int | None = None

    @property
    def open(self) -> int:
        """The number of requests that have not ended."""
        return (
            len(self.asked) - len(self.errors) - sum(response.end is not None for response in self.responses.values())
        )

    def ends(self) -> Iterator[str | None]:
        """Yield the end of each response; that of one with pictures follows the word `picture`."""
        for response in self.responses.values():
            if response.wanted.pictures:
                yield "picture"
            yield response.end

    def last_id(self, name: str) -> str | None:
        """Return the id of a request's response if it was completed."""
        wanted = self.asked[name][0]
        found = [
            key for key, response in self.responses.items() if response.wanted is wanted and response.end == "completed"
        ]
        return f"resp_{found[0]}" if found else None

    def judge_event(self, event: judge.Json) -> None:
        """Judge one event."""
        kind = event["type"]
        if kind == "error":
            assert len(self.errors) < len(self.asked)
            mays = [judge.may_of(self.may, wanted) for wanted, _ in self.asked.values()]
            self.errors.append(judge.error(event["error"], lambda code: any(may(code) for may in mays)))
            return
        number = (event.get("item_id") or event.get("item", {}).get("id") or event["response"]["id"]).partition("_")[2]
        # For a response that a slow client had not begun to get, it gets only the failure.
        dropped = kind == "response.failed" and event["response"]["error"]["cause"] == "slow_client"
        if kind == "response.created" or (dropped and number not in self.responses):
            name = event["response"]["metadata"]["k"]
            assert name in self.asked, "another request's response"
            wanted, lane = self.asked[name]
            assert number not in self.responses
            assert all(response.wanted is not wanted for response in self.responses.values()), "answered twice"
            self.responses[number] = _Response(wanted, lane)
        response = self.responses[number]
        if dropped:
            assert event["sequence_number"] >= response.events
        else:
            assert event["sequence_number"] == response.events, "an event is lost or doubled"
        assert event.get("stream_id") == response.lane, "an event of another lane"
        assert response.end is None, "something follows the end"
        response.events += 1
        if kind == "response.output_text.delta":
            response.text += event["delta"]
            assert whole(response.wanted).choices[0].text.startswith(response.text), "wrong text"
        elif kind == "response.output_text.done":
            assert event["text"] == response.text
        elif kind in FINAL_EVENTS - {"error"}:
            response.end = self._ended(response, event["response"])

    def judge_whole(self, body: judge.Json) -> None:
        """Judge a response that comes in one piece."""
        wanted, lane = self.asked[body["metadata"]["k"]]
        text = "".join(part["text"] for item in body["output"] for part in item["content"])
        response = self.responses[body["id"]] = _Response(wanted, lane, text=text)
        response.end = self._ended(response, body)

    def _ended(self, response: _Response, body: judge.Json) -> str:
        correct = whole(response.wanted).choices[0]
        text = "".join(part["text"] for item in body["output"] for part in item["content"])
        if body["status"] == "failed":
            cause: str = body["error"]["cause"]
            dropped = cause == "slow_client"
            assert text == response.text or (dropped and correct.text.startswith(text))
            may = judge.may_of(self.may, response.wanted)
            judge.error({"code": cause, "message": body["error"]["message"]}, may)
            return cause
        assert text == response.text
        details = body["incomplete_details"]
        if details == {"reason": "cancelled"}:
            before = sum(each.end == "cancelled" and each.lane == response.lane for each in self.responses.values())
            assert before < self.cancels[response.lane], "no client cancelled it"
            return "cancelled"
        assert details in (None, {"reason": "max_output_tokens"})
        complete = (response.text, "stop" if details is None else "length")
        assert complete == (correct.text, correct.reason), "a truncated answer looks complete"
        cost = whole(response.wanted)
        assert not response.wanted.must_fail, "what must be refused was answered"
        usage = (body["usage"]["input_tokens"], body["usage"]["output_tokens"])
        assert usage == (cost.prompt_tokens, cost.completion_tokens)
        return "completed"

    def closed(self, *, stayed: bool) -> None:
        """Judge the end of the connection by either side."""
        if self.close_code is not None:
            assert self.close_code in CLOSES, self.close_code
            code = CLOSES[self.close_code]
            if stayed and code != "normal":
                assert self.may(code), f"closed as {code}"
        begun = sum(response.end is None for response in self.responses.values())
        if begun:
            judge.unfinished("cut", self.may, stayed=stayed)
        if self.open > begun:
            judge.unfinished("unanswered", self.may, stayed=stayed)


@define(eq=False)
class LaneClient(HttpClient):
    """A WebSocket client that sends requests, continues earlier responses, cancels, and disconnects."""

    transcript: Transcript = field(init=False)
    _last: dict[str | None, str] = Factory(dict)  # name of the latest request, by lane
    _changed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    def allowed(self, code: str) -> bool:
        crowded = code == "overloaded" and self.transcript.open > self.system.limits.websocket_queue_max
        return crowded or HttpClient.allowed(self, code)

    def __attrs_post_init__(self) -> None:
        self.transcript = Transcript(self.allowed)

    async def _converse(self, reader: Reader) -> None:
        rng = self.rng
        reader.pause_s = rng.choice((0, 0, 0, 0.3))
        self.slow = reader.pause_s > 0
        if not await self._upgraded(reader):
            return
        patience_s = rng.choice((rng.expovariate(1), rng.expovariate(4), 1e4, 1e4, 1e4))
        with trio.move_on_after(patience_s) as patience, suppress(*GONE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read_events, reader, nursery.cancel_scope)
                with suppress(*GONE):  # the client may still read the reason
                    await self._send_requests(reader)
        self.transcript.closed(stayed=not patience.cancelled_caught)
        self.note(self.name, *self.transcript.ends(), *self.transcript.errors, self.transcript.close_code)
        if patience.cancelled_caught:
            await reader.leave(rng.choice(("close", "reset", "half")))
        await self._check_gone([wanted for wanted, _ in self.transcript.asked.values()])

    async def _upgraded(self, reader: Reader) -> bool:
        try:
            reply = await reader.upgrade()
        except GONE:
            assert self.may("unanswered")
            return False
        if reply.status != 101:
            judge.error(reply.error, self.may)
        return reply.status == 101

    async def _send_requests(self, reader: Reader) -> None:
        """Send a few requests in a few lanes, cancel some, wait for all to end, and close."""
        rng = self.rng
        lanes = [None, *(f"lane.{number}" for number in range(rng.choice((0, 0, 1, 3))))]
        for number in range(rng.randint(1, 5)):
            lane = rng.choice(lanes)
            await self._ask(reader, f"{self.name}.{number}", lane)
            if rng.random() < 0.2:
                await trio.sleep(rng.choice((0, rng.random())))
                self.transcript.cancels[lane] += 1
                await reader.say({"type": "response.cancel"} | ({} if lane is None else {"stream_id": lane}))
            if rng.random() < 0.2:
                await reader.send(frame(b"are you there", 0x89))
            if rng.random() < 0.4:
                await self._until_quiet()
        await self._until_quiet()
        with suppress(*GONE):
            await reader.send(frame(struct.pack(">H", 1000), 0x88))

    async def _ask(self, reader: Reader, name: str, lane: str | None) -> None:
        """Request a response, sometimes as a continuation of the latest of some lane."""
        rng, transcript = self.rng, self.transcript
        album = self.system.album
        wanted = draw(rng, name, album=album, guides=self.system.guides)
        event: dict[str, object] = {}
        before = self._last.get(rng.choice([lane, *self._last]))
        if before is not None and (response_id := transcript.last_id(before)) is not None and rng.random() < 0.7:
            asked, _ = transcript.asked[before]
            turns = tuple(turn for turn in asked.turns if turn[0] != "system")
            history = (*turns, ("assistant", whole(asked).choices[0].text))
            wanted, event = (
                draw(rng, name, history, album=album, guides=self.system.guides),
                {"previous_response_id": response_id},
            )
            event["input"] = [{"role": "user", "content": input_content(wanted.turns[-1][1])}]
        transcript.asked[name] = wanted, lane
        if wanted.refused:
            self.system.refused.add(tuple(wanted.prompt))
        self._last[lane] = name
        await reader.say(create(wanted, name, lane) | event)

    async def _until_quiet(self) -> None:
        while self.transcript.open:
            await self._changed.park()

    async def _read_events(self, reader: Reader, sending: trio.CancelScope) -> None:
        with suppress(*GONE):
            while True:
                first, payload = await reader.frame()
                if first == 0x88:
                    self.transcript.close_code = int.from_bytes(payload[:2], "big")
                    break
                if first == 0x81:
                    self.transcript.judge_event(json.loads(payload))
                    self._changed.unpark_all()
                else:
                    assert first in {0x89, 0x8A}
        sending.cancel(reason="the connection has ended")


def create(wanted: PlannedRequest, name: str, lane: str | None) -> dict[str, object]:
    """Return the `response.create` of a request."""
    turns = [{"role": role, "content": input_content(content)} for role, content in wanted.turns if role != "system"]
    body: dict[str, object] = {"type": "response.create", "model": "tiny", "input": turns, "metadata": {"k": name}}
    body |= {"max_output_tokens": wanted.tokens_max}
    if wanted.turns[0][0] == "system":
        body["instructions"] = wanted.turns[0][1]
    body |= {} if lane is None else {"stream_id": lane}
    return body | options(wanted)


def input_content(content: Content) -> object:
    """Return the content of a message as Responses has it."""
    return content if isinstance(content, str) else [_input_part(part) for part in content]


def _input_part(part: str | Picture) -> dict[str, object]:
    if isinstance(part, str):
        return {"type": "input_text", "text": part}
    if part.frames:
        return {"type": "input_video", "video_url": part.url}
    detail = {} if part.detail is Detail.AUTO else {"detail": part.detail.value}
    return {"type": "input_image", "image_url": part.url, **detail}


@define(eq=False)
class DeafLaneClient(LaneClient):
    """A client that sends many requests, reads nothing for a while, and then what is still there."""

    async def _converse(self, reader: Reader) -> None:
        self.slow = True
        if not await self._upgraded(reader):
            return
        with suppress(*GONE):
            for number in range(6):
                await self._ask(reader, f"{self.name}.{number}", f"lane.{number % 3}")
        for _ in range(self.rng.choice((1, 60))):
            await trio.sleep(0.5)
            self.system.check_backlogs()
        await self._read_events(reader, trio.CancelScope())
        self.transcript.closed(stayed=True)
        self.note(self.name, "deaf in lanes", self.transcript.close_code)
        reader.hang_up()
        await self._check_gone([wanted for wanted, _ in self.transcript.asked.values()])
