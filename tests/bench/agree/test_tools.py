"""The load tools: the same load on each one's command line, and their results read by our words."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench.agree.tools import FIGURES, OTHERS, OURS, Load, Tool
from bench.peers.install import LISTS
from bench.peers.peer import ENVIRONMENTS

TOOLS = {OURS.name: OURS, **OTHERS}
each_tool = pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)

LOAD = Load(url="http://127.0.0.1:18999", model="tiny", tokenizer=Path("/model"), clients=7, requests=175)


def percentiles(p50: float, p99: float) -> dict[str, float]:
    return {"p50": p50, "p99": p99}


def successful(values: dict[str, Any]) -> dict[str, Any]:
    return {"successful": values}


RESULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "load": (
        "load.json",
        {
            "rates": {"requests_per_s": 20.0, "output_tokens_per_s": 1280.0},
            "latencies": {
                "ttft": percentiles(12.0, 30.0),
                "itl": percentiles(6.2, 9.0),
                "tpot": percentiles(6.0, 6.1),
                "e2e": percentiles(390.0, 400.0),
            },
        },
    ),
    "aiperf": (
        "profile_export_aiperf.json",
        {
            "request_throughput": {"avg": 20.0},
            "output_token_throughput": {"avg": 1280.0},
            "time_to_first_token": percentiles(12.0, 30.0),
            "inter_chunk_latency": percentiles(6.2, 9.0),
            "inter_token_latency": percentiles(6.0, 6.1),
            "request_latency": percentiles(390.0, 400.0),
        },
    ),
    "guidellm": (
        "guidellm.json",
        {
            "benchmarks": [
                {
                    "metrics": {
                        "requests_per_second": successful({"mean": 20.0}),
                        "output_tokens_per_second": successful({"mean": 1280.0}),
                        "time_to_first_token_ms": successful({"percentiles": percentiles(12.0, 30.0)}),
                        "inter_token_latency_ms": successful({"percentiles": percentiles(6.0, 6.1)}),
                        "request_latency": successful({"percentiles": percentiles(0.39, 0.4)}),
                    }
                }
            ]
        },
    ),
    "bench-serving": (
        "serving.jsonl",
        {
            "request_rate": float("inf"),  # written as Infinity, which is no JSON
            "request_throughput": 20.0,
            "output_throughput": 1280.0,
            "median_ttft_ms": 12.0,
            "p99_ttft_ms": 30.0,
            "median_itl_ms": 6.2,
            "median_tpot_ms": 6.0,
            "median_e2e_latency_ms": 390.0,
        },
    ),
}
WANTED = {
    "requests/s": 20.0,
    "output tokens/s": 1280.0,
    "first token p50 ms": 12.0,
    "first token p99 ms": 30.0,
    "gap p50 ms": 6.2,
    "token p50 ms": 6.0,
    "request p50 ms": 390.0,
}
LACKS = {"guidellm": {"gap p50 ms"}}  # it keeps one mean for each request


@each_tool
def test_the_results_of_a_tool_are_read_by_our_words(tool: Tool, tmp_path: Path) -> None:
    name, document = RESULTS[tool.name]
    (tmp_path / name).write_text(json.dumps(document))
    assert tool.read(tmp_path) == {
        figure: value for figure, value in WANTED.items() if figure not in LACKS.get(tool.name, ())
    }
    assert list(WANTED) == list(FIGURES)


@each_tool
def test_a_tool_writes_its_results_where_they_are_read(tool: Tool, tmp_path: Path) -> None:
    words = " ".join(tool.words(LOAD, tmp_path, "/env/bin/python"))
    name, _ = RESULTS[tool.name]
    assert str(tmp_path / name) in words or f"--artifact-dir {tmp_path} " in words


@each_tool
def test_a_tool_is_told_the_server_and_the_load(tool: Tool, tmp_path: Path) -> None:
    words = tool.words(LOAD, tmp_path, "/env/bin/python")
    text = " ".join(words)
    assert words[0].startswith("/env/bin/")
    assert LOAD.url in text
    assert "tiny" in text
    options = dict(pairwise(words))
    clients = {
        "load": ("--clients", "7"),
        "aiperf": ("--concurrency", "7"),
        "guidellm": ("--profile", "kind=concurrent,streams=7,warmup=7"),
        "bench-serving": ("--max-concurrency", "7"),
    }
    requests = {
        "load": ("--requests", "175"),
        "aiperf": ("--request-count", "175"),
        "guidellm": ("--constraint", "kind=max_requests,count=182"),  # the warm-up is part of them
        "bench-serving": ("--num-prompts", "175"),
    }
    for name, value in (clients[tool.name], requests[tool.name]):
        assert options[name] == value


@pytest.mark.parametrize("tool", OTHERS.values(), ids=OTHERS)
def test_the_version_in_a_tools_title_is_the_one_that_is_installed(tool: Tool) -> None:
    name, _, version = tool.title.partition(" ")
    package = {"sglang.bench_serving": "sglang"}.get(name, name)
    assert f"{package}=={version}" in pins(f"{tool.environment}.txt")
    assert tool.python() == str(ENVIRONMENTS / str(tool.environment) / "bin" / "python")


def pins(name: str, folder: Path = LISTS) -> list[str]:
    """Return the lines of a list and of those that it includes."""
    lines = []
    for line in (folder / name).read_text().splitlines():
        if line.startswith("-r "):
            lines += pins(Path(line[3:]).name, (folder / line[3:]).parent.resolve())
        else:
            lines.append(line)
    return lines
