"""Clients of the other HTTP routes: completions of plain texts, and responses without a history."""

from __future__ import annotations

import json

from attrs import define, evolve

from tests.rig.gateway import post
from tests.system.simulator import judge
from tests.system.simulator.clients import HttpClient, options
from tests.system.simulator.lanes import Transcript, create
from tests.system.simulator.model import PlannedRequest, draw


@define(eq=False)
class TextClient(HttpClient):
    """A client of text completions."""

    def _draw(self, name: str) -> PlannedRequest:
        drawn = draw(self.rng, name, choices_max=3)
        wanted = evolve(drawn, plain=True, logprobs=None, turns=drawn.turns[-1:], echo=self.rng.random() < 0.3)
        return evolve(wanted, table=drawn.logprobs if wanted.echo else None)

    def post(self, wanted: PlannedRequest, **headers: str) -> bytes:
        body: dict[str, object] = {"model": "tiny", "prompt": wanted.turns[-1][1], "max_tokens": wanted.tokens_max}
        body |= {"n": wanted.n, "stream": wanted.stream, "echo": wanted.echo, "logprobs": wanted.table}
        if wanted.stream and wanted.usage:
            body["stream_options"] = {"include_usage": True}
        return post(body | options(wanted), "/v1/completions", **headers)


@define(eq=False)
class PostClient(HttpClient):
    """A client of responses over HTTP, streamed as the events of a WebSocket, or in one piece."""

    def _draw(self, name: str) -> PlannedRequest:
        return evolve(draw(self.rng, name, album=self.system.album), logprobs=None)

    def post(self, wanted: PlannedRequest, **headers: str) -> bytes:
        event = create(wanted, wanted.name, None) | {"stream": wanted.stream}
        del event["type"]
        return post(event, "/v1/responses", **headers)

    def judged(self, wanted: PlannedRequest, received: judge.Received, *, stayed: bool) -> str:
        if received.status != 200 or not (wanted.stream or received.whole):
            return judge.http(wanted, received, self.allowed, stayed=stayed)
        transcript = Transcript(self.allowed, {wanted.name: (wanted, None)})
        if wanted.stream:
            *events, rest = bytes(received.body).decode(errors="ignore").split("\n\n")
            assert not (stayed and rest), "half an event"
            for lines in events:
                if lines == judge.KEEP_ALIVE:
                    continue
                kind, data = lines.split("\n")
                event = json.loads(data.removeprefix("data: "))
                assert kind == f"event: {event['type']}"
                transcript.judge_event(event)
        else:
            transcript.judge_whole(json.loads(received.body))
        [end] = [response.end for response in transcript.responses.values()] or [None]
        assert not received.whole or end is not None, "an answer that was cut looks whole"
        return end or judge.unfinished("cut", self.allowed, stayed=stayed)
