"""A grid over two real engines: the length of a prompt decides which of them computes it."""

from __future__ import annotations

import httpx2
import pytest

from bench.rig.node import MODEL, SGLANG, node, short_folder, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

WITHIN_S = 90.0
SHORT, LONG = 20, 150
POOLS = f"""
[engine.{MODEL}-1]
model = "{MODEL}"
slots = 16
{SGLANG}
[pool.short]
engines = ["{MODEL}-0"]
[pool.long]
engines = ["{MODEL}-1"]
[model.{MODEL}.grid.both]
input_tokens_min = 0
input_tokens_max = 200
input_resolution = 2
ttft_min_ms = 10
ttft_max_ms = 1000
ttft_resolution = 1
pools = [["short"], ["long"]]
"""


def test_a_prompt_is_computed_by_the_engine_of_its_cell() -> None:
    with short_folder() as folder, node(folder, engine=SGLANG + POOLS) as running:
        url = f"http://127.0.0.1:{running.port}"

        def route(tokens: int) -> tuple[str, list[int]]:
            wanted = {"model": MODEL, "prompt": [5] * tokens, "max_tokens": 4, "temperature": 0}
            answer = httpx2.post(
                f"{url}/v1/completions", json={**wanted, "return_token_ids": True}, timeout=WITHIN_S
            ).raise_for_status()
            return answer.headers["x-route"].split(";")[0], answer.json()["choices"][0]["token_ids"]

        def up() -> dict[str, int]:
            pools = httpx2.get(f"{url}/pools", timeout=WITHIN_S).json()["pools"]
            return {pool["name"]: pool["up"] for pool in pools}

        assert wait_until(lambda: up() == {"short": 1, "long": 1}, WITHIN_S) is not None
        (short, few), (long, many) = route(SHORT), route(LONG)
        assert [short, long] == [f"main/{MODEL}-0", f"main/{MODEL}-1"]
        assert few
        assert many
