"""Valid requests among all that are not, and the one response that each must get."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from attrs import frozen

from tests.rig.gateway import LINE, TINY, ids
from tests.system.fuzz.answers import Answer
from tests.system.fuzz.http import head, posted
from tests.system.fuzz.websocket import frame

LANE = "exact"


@frozen
class Exact:
    """One request and what tells its right answer from every other."""

    kind: str
    data: bytes
    right: Callable[[object], bool]


def text_of(count: int) -> str:
    """Return what the worker says in so many tokens."""
    return TINY.tokenizer.decode(ids(LINE)[:count])


COUNTS = [count for count in range(1, 13) if LINE.startswith(text_of(count))]  # those that end with a whole character


def _whole(take: Callable[[Any], object], wanted: object) -> Callable[[object], bool]:
    def right(answer: object) -> bool:
        return isinstance(answer, Answer) and answer.status == 200 and take(answer.json) == wanted

    return right


def _streamed(wanted: str) -> Callable[[object], bool]:
    def right(answer: object) -> bool:
        if not isinstance(answer, Answer) or not answer.body.endswith(b"\n\ndata: [DONE]\n\n"):
            return False
        chunks = [json.loads(line[6:]) for line in answer.body.decode().split("\n\n")[:-2]]
        text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
        return (text, chunks[-1]["choices"][0]["finish_reason"]) == (wanted, "stop")

    return right


def _completed(wanted: str) -> Callable[[object], bool]:
    def right(events: object) -> bool:
        mine = [event for event in events if event.get("stream_id") == LANE]  # type: ignore[attr-defined]
        text = "".join(event["delta"] for event in mine if event["type"] == "response.output_text.delta")
        return (text, mine[-1]["type"] if mine else None) == (wanted, "response.completed")

    return right


def _health(answer: object) -> bool:
    return isinstance(answer, Answer) and (answer.status, answer.body) == (200, b"alive\n")


def make(rng: Random) -> Exact:  # noqa: PLR0911  # one case a door
    """Return a request that is right."""
    count = rng.choice(COUNTS)
    asked, text = f"n={count}", text_of(count)
    user = [{"role": "user", "content": asked}]

    def post(path: str, right: Callable[[object], bool], **body: object) -> Exact:
        return Exact("exchange", posted(path, json.dumps(body).encode()), right)

    match rng.randrange(8):
        case 0:
            right = _whole(lambda body: [choice["message"]["content"] for choice in body["choices"]], [text, text])
            return post("/v1/chat/completions", right, model="tiny", messages=user, n=2)
        case 1:
            return post("/v1/chat/completions", _streamed(text), model="tiny", messages=user, stream=True)
        case 2:
            right = _whole(lambda body: (body["choices"][0]["text"], body["usage"]["completion_tokens"]), (text, count))
            return post("/v1/completions", right, model="tiny", prompt=asked, max_tokens=64)
        case 3:
            right = _whole(lambda body: body["output"][0]["content"][0]["text"], text)
            return post("/v1/responses", right, model="tiny", input=asked)
        case 4:
            right = _whole(lambda body: body["tokens"], ids(text))
            return post("/tokenize", right, prompt=text, add_special_tokens=False)
        case 5:
            return post("/detokenize", _whole(lambda body: body["text"], text), tokens=ids(text))
        case 6:
            return Exact("exchange", head("GET", "/health", [("host", "127.0.0.1")]), _health)
        case _:
            event = {"type": "response.create", "model": "tiny", "input": asked, "stream_id": LANE}
            return Exact("event", frame(json.dumps(event).encode()), _completed(text))
