"""JSON bodies for each operation, valid and mutated."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

from protocol.openapi.document import Operation
from tests.system.fuzz.values import KEYS, corrupted, hostile_value, huge, text

Body = dict[str, object]

MESSAGES: list[Body] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "n=3"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OPTIONS = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "frequency_penalty": 0.1, "presence_penalty": -0.1,
    "repetition_penalty": 1.1, "logit_bias": {"5": 1.5}, "stop": ["zz", "qq"], "stop_token_ids": [7], "seed": 3,
    "include_stop_str_in_output": True, "min_tokens": 1, "ignore_eos": True, "return_token_ids": True, "priority": 2,
    "cache_salt": "salt", "metadata": {"a": "b"}, "user": "u", "store": False, "service_tier": "auto",
}  # fmt: skip
SHARED = {
    "n": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    "regex": "[a-z]+",
}
CHAT = {"logprobs": True, "top_logprobs": 2, "max_completion_tokens": 4, "tools": [], **SHARED, **OPTIONS}
COMPLETION = {"logprobs": 1, "max_tokens": 4, "echo": True, "best_of": 2, **SHARED, **OPTIONS}
FUNCTION: Body = {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
FLAT_TOOLS: list[Body] = [FUNCTION, {"type": "namespace", "name": "n", "description": "d", "tools": [FUNCTION]}]
RESPONSE = {
    "instructions": "be brief", "max_output_tokens": 4, "include": ["message.output_text.logprobs"], "top_logprobs": 1,
    "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}, "truncation": "auto", "stream": True,
    "previous_response_id": "resp_1", "tools": FLAT_TOOLS, "tool_choice": "auto", "parallel_tool_calls": False,
    "reasoning": {}, **OPTIONS,
}  # fmt: skip
PROMPTS = ("n=3", ["n=2", "n=1"], [5, 6, 7], [[5, 6], [7]])
INPUTS: tuple[str | list[Body], ...] = (
    "n=3",
    [{"role": "user", "content": "n=2"}],
    [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "n=2"}], "id": "m"}],
    [
        {"role": "user", "content": "n=2"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "n=2"}]},
        {
            "type": "function_call",
            "call_id": "c",
            "namespace": "n",
            "name": "f",
            "arguments": "{}",
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "n=2"}]},
        {"type": "function_call_output", "call_id": "c", "output": "n=2"},
    ],
)

DATA_URL = "data:image/png;base64,iVBORw0KGgo="
MEDIA_URLS = (
    DATA_URL, "DATA:video/mp4;BASE64,AAAA", "https://media.example/cat.png?size=1#top", "http://[2001:db8::1]:8080/a%20b.mp4",
    "file:///srv/media/cat.png", "https://127.0.0.1/cat.png", "http://169.254.169.254/latest/meta-data",
)  # fmt: skip
HOSTILE_URLS = (
    "https://", "https:///cat.png", "https://user:password@media.example/cat.png", "https://a.example:99999/", "https://[::1",
    "file://media.example/cat.png", "file:cat.png", "file:///srv/../etc/passwd?x", "gopher://a.example/", "cat.png", "data:",
    "data:image/png;base64", "data:image/png;base64,", "data:image/png,%89PNG", "https://a.example/\r\nhost: b.example",
    "https://a.example\\@b.example/", "https://a.example/cat.pt", "file:///srv/media/CAT%2EPTH", "https://\u0430.example/",
    "iVBORw0KGgo=", "data:" + "," * 5000, "data:" + "x" * 5000, "https://a.example/" + "x" * 9000,
)  # fmt: skip


def _chat_media(rng: Random) -> Body:
    url, detail = rng.choice(MEDIA_URLS), rng.choice(("auto", "low", "high", "original", None))
    parts: tuple[Body, ...] = (
        {"type": "image_url", "image_url": {"url": url, "detail": detail}, "modalities": "image"},
        {"type": "image_url", "image_url": {"url": url, "max_dynamic_patch": None}, "uuid": None},
        {"type": "image_url", "image_url": url},
        {"type": "video_url", "video_url": {"url": url, "fps": None}},
        {"type": "video_url", "video_url": url},
        {"type": "image_embeds", "image_embeds": "UAAAAAAAAAB7fQ=="},
    )
    return rng.choice(parts)


def _response_media(rng: Random) -> Body:
    url, detail = rng.choice(MEDIA_URLS), rng.choice(("auto", "low", "high", "original"))
    parts: tuple[Body, ...] = (
        {"type": "input_image", "image_url": url, "detail": detail, "file_id": None},
        {"type": "input_image", "image_url": url},
        {"type": "input_video", "video_url": url},
    )
    return rng.choice(parts)


def _content(rng: Random, text: Body, media: Callable[[Random], Body]) -> list[Body]:
    """Return texts and a few images and videos in any order, sometimes with URLs that must not be fetched."""
    parts = [deepcopy(text) if rng.random() < 0.5 else media(rng) for _ in range(rng.randrange(1, 5))]
    if rng.random() < 0.2:
        replace_urls(rng, parts)
    return parts


def replace_urls(rng: Random, parts: list[Body]) -> None:
    """Give some parts URLs that must not be fetched."""
    for part in parts:
        for name in ("image_url", "video_url", "image_embeds"):
            if name in part and rng.random() < 0.7:
                url = rng.choice(HOSTILE_URLS)
                part[name] = {"url": url} if isinstance(part[name], dict) else url


def _some(rng: Random, fields: Body) -> Body:
    names = rng.sample(list(fields), min(len(fields), rng.choice((0, 0, 1, 1, 2, 3, 6))))
    return {name: deepcopy(fields[name]) for name in names}


def chat(rng: Random) -> Body:
    parts: list[Body] = [{"type": "text", "text": "n="}, {"type": "text", "text": "2"}]
    conversations: tuple[list[Body], ...] = (MESSAGES, [{"role": "user", "content": parts}], [*MESSAGES, *MESSAGES])
    messages = deepcopy(rng.choice(conversations))
    if rng.random() < 0.3:
        role = "user" if rng.random() < 0.9 else "assistant"
        messages.append({"role": role, "content": _content(rng, parts[0], _chat_media)})
    return {"model": "tiny", "messages": messages, **_some(rng, CHAT)}


def completion(rng: Random) -> Body:
    return {"model": "tiny", "prompt": deepcopy(rng.choice(PROMPTS)), **_some(rng, COMPLETION)}


def response(rng: Random) -> Body:
    items: str | list[Body] = deepcopy(rng.choice(INPUTS))
    if isinstance(items, list) and rng.random() < 0.3:
        role = "user" if rng.random() < 0.9 else "system"
        items.append({"role": role, "content": _content(rng, {"type": "input_text", "text": "n=2"}, _response_media)})
    return {"model": "tiny", "input": items, **_some(rng, RESPONSE)}


def tokenize(rng: Random) -> Body:
    seen = [{"role": "user", "content": [_chat_media(rng)]}]  # which is refused
    messages = seen if rng.random() < 0.1 else deepcopy(MESSAGES)
    fields = rng.choice(({"prompt": "a b", "add_special_tokens": True}, {"messages": messages}))
    return {**fields, **({"model": "tiny"} if rng.random() < 0.5 else {})}


def detokenize(rng: Random) -> Body:
    return {"tokens": [rng.randrange(520) for _ in range(rng.randrange(1, 9))], "skip_special_tokens": False}


CUTS: Body = {"truncate": True, "truncate_prompt_tokens": -1, "priority": 2, "user": "u", "add_special_tokens": True}
EMBEDDINGS: Body = {"encoding_format": "base64", "dimensions": 4, "input_type": "query", "prompt_name": "query", **CUTS}


def embeddings(rng: Random) -> Body:
    return {"model": "tiny", "input": deepcopy(rng.choice(PROMPTS)), **_some(rng, EMBEDDINGS)}


def rerank(rng: Random) -> Body:
    documents = ["The oak", {"text": "The elm"}]
    fields: Body = {"top_n": 1, "return_documents": True, "max_tokens_per_doc": 9, **CUTS}
    return {"model": "tiny", "query": "a", "documents": deepcopy(documents), **_some(rng, fields)}


def score(rng: Random) -> Body:
    texts: tuple[str | list[str], ...] = ("a", ["a"], ["a", "b"])
    pair = {"text_1": deepcopy(rng.choice(texts)), "text_2": deepcopy(rng.choice(texts))}
    return {"model": "tiny", **pair, **_some(rng, CUTS)}


def event(rng: Random) -> Body:
    """Return an event of a WebSocket; the lane `exact` is for what is looked at closely."""
    if rng.random() < 0.15:
        return {"type": "response.cancel", **rng.choice(({}, {"response_id": "resp_1"}, {"stream_id": "a"}))}
    fields = {"type": "response.create", **response(rng)}
    if rng.random() < 0.4:
        fields["stream_id"] = rng.choice(("a", "b", "c.d"))
    return fields | ({"generate": False} if rng.random() < 0.1 else {})


# Of routes whose bodies are worth more than their example; the others' examples are mutated.
MAKERS: dict[str, Callable[[Random], Body]] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completion,
    "/v1/responses": response,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    "/v1/embeddings": embeddings,
    **dict.fromkeys(("/v1/rerank", "/rerank", "/v2/rerank"), rerank),
    **dict.fromkeys(("/v1/score", "/score"), score),
}


def body(rng: Random, operation: Operation) -> Body:
    """Return a body that an operation takes."""
    if (maker := MAKERS.get(operation.path)) is not None:
        return maker(rng)
    assert isinstance(operation.example, dict)
    return deepcopy(operation.example)


def mutated(rng: Random, body: Body) -> bytes:
    """Return the JSON of a valid body after random changes."""
    kind = rng.random()
    if kind < 0.006:
        name = rng.choice([*body])
        whole = text({key: value for key, value in body.items() if key != name})
        return whole[:-1] + (b"," if len(whole) > 2 else b"") + text(name) + b":" + huge(rng) + b"}"
    if kind < 0.15:
        return corrupted(rng, text(body))
    if kind < 0.2:
        name = rng.choice([*body])  # a key that stands twice
        return text(body)[:-1] + b"," + text(name) + b":" + text(hostile_value(rng)) + b"}"
    if kind < 0.23:
        return text(rng.choice((hostile_value(rng), [body], {"a": body})))
    if kind < 0.9:
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            spoil(rng, body)
    return text(body)


def spoil(rng: Random, body: Body) -> None:
    """Change one place somewhere inside."""
    place: Any = body
    while True:
        keys = list(range(len(place))) if isinstance(place, list) else list(place) if isinstance(place, dict) else []
        if not keys:
            body[rng.choice(KEYS)] = hostile_value(rng)
            return
        key = rng.choice(keys)
        inner = place[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.5:
            place = inner
            continue
        match rng.randrange(6):
            case 0:
                del place[key]
            case 1 if isinstance(place, dict):
                place[rng.choice(KEYS)] = hostile_value(rng)
            case 1:
                place.insert(key, hostile_value(rng))
            case 2 if isinstance(place, dict):
                place[f"{key}{rng.choice(KEYS)}"] = place.pop(key)
            case 3:
                place[key] = [inner] if rng.random() < 0.5 else {"a": inner}
            case _:
                place[key] = hostile_value(rng)
        return
