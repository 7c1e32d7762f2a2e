"""Clients of the other HTTP routes: completions of plain texts, and responses without a history."""

from __future__ import annotations

import json

from attrs import define, evolve

from tests.rig.gateway import post
from tests.system.simulator import judge
from tests.system.simulator.clients import HttpClient, options
from tests.system.simulator.lanes import Transcript, create
from tests.system.simulator.model import Wanted, draw


@define(eq=False)
class TextClient(HttpClient):
    """Asks for completions of texts."""

    def _draw(self, name: str) -> Wanted:
        wanted = evolve(HttpClient._draw(self, name), plain=True, logprobs=None)
        return evolve(wanted, turns=wanted.turns[-1:], echo=self.rng.random() < 0.3)

    def _post(self, wanted: Wanted, **headers: str) -> bytes:
        body: dict[str, object] = {"model": "tiny", "prompt": wanted.turns[-1][1], "max_tokens": wanted.tokens_max}
        body |= {"n": wanted.n, "stream": wanted.stream, "echo": wanted.echo}
        if wanted.stream and wanted.usage:
            body["stream_options"] = {"include_usage": True}
        return post(body | options(wanted), "/v1/completions", **headers)


@define(eq=False)
class PostClient(HttpClient):
    """Asks for responses by HTTP: the events are those of a WebSocket, or the last one's response comes alone."""

    def _draw(self, name: str) -> Wanted:
        return evolve(draw(self.rng, name), logprobs=None)

    def _post(self, wanted: Wanted, **headers: str) -> bytes:
        event = create(wanted, wanted.turns[-1][1].split()[0], None) | {"stream": wanted.stream}
        del event["type"]
        return post(event, "/v1/responses", **headers)

    def _judge(self, wanted: Wanted, heard: judge.Heard, *, stayed: bool) -> str:
        if heard.status != 200 or not (wanted.stream or heard.whole):
            return judge.http(wanted, heard, self.true, stayed=stayed)
        transcript = Transcript(self.true, {wanted.turns[-1][1].split()[0]: (wanted, None)})
        if wanted.stream:
            *events, rest = bytes(heard.body).decode(errors="ignore").split("\n\n")
            assert not (stayed and rest), "half an event"
            for event in events:
                kind, data = event.split("\n")
                said = json.loads(data.removeprefix("data: "))
                assert kind == f"event: {said['type']}"
                transcript.hear(said)
        else:
            transcript.hear_alone(json.loads(heard.body))
        [end] = [each.end for each in transcript.responses.values()] or [None]
        assert not heard.whole or end is not None, "an answer that was cut looks whole"
        return end or judge.unheard("cut", self.true, stayed=stayed)
