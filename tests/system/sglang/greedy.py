"""Many prompts at once, answered by their likeliest tokens, on which differently placed engines must agree."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection
from random import Random
from typing import Any

from bench.rig.node import MODEL

WITHIN_S = 60.0
TOKENS = 24
VOCABULARY = 512


def prompts(count: int, longest: int, seed: int) -> list[Any]:
    """Return prompts of 5 to `longest` tokens."""
    chance = Random(seed)
    return [[chance.randrange(3, VOCABULARY) for _ in range(chance.randint(5, longest))] for _ in range(count)]


def completed(port: int, prompt: list[Any], **others: object) -> tuple[Any, Any, Any]:
    """Return the tokens that greedily follow a prompt, why they ended, and how many of the prompt were counted.

    `others` are further fields of the request, or take the place of its own.
    """
    connection = HTTPConnection("127.0.0.1", port, timeout=WITHIN_S)
    try:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
        body |= others
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        completion = json.loads(answer.read())
        assert answer.status == 200, completion
        choice = completion["choices"][0]
        return choice["token_ids"], choice["finish_reason"], completion["usage"]["prompt_tokens"]
    finally:
        connection.close()


def all_completed(port: int, asked: list[Any], at_once: int) -> list[Any]:
    """Return what `completed` returns of each prompt, so many at a time."""
    with ThreadPoolExecutor(at_once) as clients:
        return list(clients.map(partial(completed, port), asked))
