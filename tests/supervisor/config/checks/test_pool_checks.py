"""Every mistake in pools and grids is reported at once, each with the line of its key."""

from __future__ import annotations

import pytest

from supervisor.engines.kinds import read_cluster
from tests.rig.cluster_files import MODEL
from tests.rig.pools import DECODE_GRID, PAIRS, WHOLE_GRID, WHOLES, pool, worker
from tests.supervisor.config.test_load import Written, mistakes

PREFILL, DECODE, BOTH = (f"model.tiny.grid.{leg}" for leg in ("prefill", "decode", "both"))
CASES = {
    "no cells": (
        PAIRS,
        "input_resolution = 2",
        "input_resolution = 0",
        f"{PREFILL}.input_resolution: must be at least",
    ),
    "too many": (PAIRS, "ttft_resolution = 2", "ttft_resolution = 65", f"{PREFILL}.ttft_resolution: must be at least"),
    "no range": (
        PAIRS,
        "input_tokens_max = 100",
        "input_tokens_max = 0",
        f"{PREFILL}.input_tokens_min: must be below input_tokens_max (0), got 0",
    ),
    "no number": (PAIRS, "ttft_max_ms = 1010", "ttft_max_ms = nan", f"{PREFILL}.ttft_max_ms: expected a finite number"),
    "least": (
        PAIRS.replace("itl_resolution = 1", "itl_resolution = 3").replace("itl_min_ms = 5", "itl_min_ms = 0"),
        'itl_max_ms = 105\nitl_resolution = 3\npools = [["short"], ["long"]]',
        'itl_max_ms = 5e-324\nitl_resolution = 3\npools = [["short", "short", "long"], ["long", "long", "long"]]',
        f"{DECODE}.itl_resolution: cannot divide a range",
    ),
    "a column too many": (
        PAIRS,
        '["short"], ["long"]',
        '["short"], ["long", "long"]',
        f"{DECODE}.pools[1]: has 2 pools, and itl_resolution is 1",
    ),
    "no mapping": (PAIRS, 'pools = [["short"], ["long"]]\n', "", f"{DECODE}.pools: is missing"),
    "a number": (PAIRS, '[["short"], ["long"]]', "[[0], [1]]", f"{DECODE}.pools[0][0]: expected a string"),
    "unknown": (
        PAIRS,
        '[["short"], ["long"]]',
        '[["shorter"], ["long"]]',
        f"{DECODE}.pools[0][0]: there is no pool shorter; there is quick, cheap, short, long",
    ),
    "empty": (PAIRS, '["p2"]', "[]", "pool.cheap.engines: is missing or empty"),
    "twice": (PAIRS, '["p2"]', '["p2", "p2"]', "pool.cheap.engines[1]: engine p2 is in pool cheap already"),
    "two legs": (
        PAIRS.replace('["d1"]', '["d2"]') + worker("d2", "decode"),
        '["p2"]',
        '["p2", "d1"]',
        "pool.cheap.engines[1]: is no engine of model tiny whose leg is prefill, as the first of the pool",
    ),
    "a name": (
        PAIRS.replace('"cheap"', '"che ap"'),
        "[pool.cheap]",
        '[pool."che ap"]',
        'pool["che ap"]: must be letters, digits',
    ),
    "beside": (
        PAIRS + worker("w0", "both") + pool("whole", "w0"),
        DECODE_GRID,
        DECODE_GRID + WHOLE_GRID.replace("quick", "whole").replace("cheap", "whole"),
        f"{BOTH}: stands beside {PREFILL}: keep the grids of one of the two",
    ),
    "no engines": (
        MODEL + worker("p0", "prefill") + worker("d0", "decode"),
        "[engine.p0]",
        WHOLE_GRID + "[engine.p0]",
        f"{BOTH}: means nothing: there is no engine of model tiny whose leg is both",
    ),
    "no grid": (
        PAIRS,
        DECODE_GRID,
        "",
        f"pool.short: means nothing: there is no {DECODE}, and it has engines whose leg is decode",
    ),
    "target": (
        WHOLES,
        "[model.tiny.grid.both]",
        "itl_target_ms = 3\n[model.tiny.grid.both]",
        f"model.tiny.itl_target_ms: means nothing without {DECODE}",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_reported_once_with_its_line(written: Written, name: str) -> None:
    good, right, wrong, sentence = CASES[name]
    assert right in good
    text = good.replace(right, wrong, 1)
    found = mistakes(written(text))
    assert len([message for _, message in found if message.startswith(sentence)]) == 1, found
    if name == "a number":
        assert [message.partition(":")[0] for _, message in found] == [f"{DECODE}.pools[{row}][0]" for row in (0, 1)]
    elif name != "no grid":  # which both of its pools miss
        assert len(found) == 1, found


def test_the_files_of_these_tests_are_right(written: Written) -> None:
    for text in (PAIRS, WHOLES):
        read_cluster(written(text))


def test_every_mistake_is_reported_at_once(written: Written) -> None:
    text = PAIRS
    for right, wrong in (
        ("input_resolution = 2\n", "input_resolution = 3\n"),
        ("ttft_max_ms = 1010", "ttft_max_ms = 9"),
        ("context_tokens_min = 0\n", ""),
        ('[["short"], ["long"]]', '[["short"], ["quick"]]'),
        ('["p2"]', '["p9"]'),
        ('["d1"]', '["d1", "d0"]'),
    ):
        assert right in text
        text = text.replace(right, wrong, 1)
    lines = text.splitlines()

    def line(start: str, nth: int = 0) -> int:
        return [number for number, each in enumerate(lines, start=1) if each.startswith(start)][nth]

    expected = [
        (line("ttft_min_ms"), f"{PREFILL}.ttft_min_ms: must be below ttft_max_ms (9), got 10"),
        (line("pools ="), f"{PREFILL}.pools: has 2 rows, and input_resolution is 3"),
        (line("[model.tiny.grid.decode]"), f"{DECODE}.context_tokens_min: is missing"),
        (line("pools =", 1), f"{DECODE}.pools[1][0]: pool quick has no engine of model tiny whose leg is decode: its"),
        (line('engines = ["p9"]'), "pool.cheap.engines[0]: there is no engine p9; there is p0, p1, p2, d0, d1"),
        (line('engines = ["d1"'), "pool.long.engines[1]: engine d0 is in pool short already"),
    ]
    found = mistakes(written(text))
    assert [number for number, _ in found] == [number for number, _ in expected]
    assert all(message.startswith(start) for (_, message), (_, start) in zip(found, expected, strict=True)), found


def test_a_wrong_engine_is_no_mistake_of_its_pool(written: Written) -> None:
    found = mistakes(written(PAIRS.replace('leg = "decode"', 'leg = "decoder"', 1)))
    assert [message.partition(":")[0] for _, message in found] == ["engine.d0.leg"]
    found = mistakes(written(PAIRS.replace("kv_tokens_max = 4096", 'kv_tokens_max = "4096"', 1)))
    assert [message.partition(":")[0] for _, message in found] == ["engine.p0.kv_tokens_max"]


def test_a_wrong_pool_is_no_mistake_of_its_grid(written: Written) -> None:
    found = mistakes(written(PAIRS.replace("[pool.cheap]\n", "[pool.cheap]\nname = 1\n", 1)))
    assert [message.partition(":")[0] for _, message in found] == ["pool.cheap.name"]
    found = mistakes(written(PAIRS.replace('engines = ["p2"]', "engines = 3", 1)))
    assert [message.partition(":")[0] for _, message in found] == ["pool.cheap.engines"]
