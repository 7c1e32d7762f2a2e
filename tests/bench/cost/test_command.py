"""`python -m bench cost`: which loads it sends to which server, and what a token costs our own."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import pytest
import trio

from bench.__main__ import main
from bench.cost import command, options, sample
from bench.cost.sample import Load
from bench.load.process import Failed
from bench.peers.peer import Setup
from bench.peers.running import started
from bench.peers.table import SERVERS
from bench.rig.node import free_port
from tests.rig.scripted_server import HEAD, Asked, chunk, delta, event, scripted, usage


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add(parser)
    return parser.parse_args(words)


def test_each_number_of_clients_and_tokens_is_a_load_of_each_api() -> None:
    loads = options.loads(parsed("--clients", "64", "1", "--output-tokens", "16", "--apis", "chat", "responses-ws"))
    assert [(load.clients, load.api, load.requests) for load in loads] == [
        (64, "chat", 192),
        (64, "responses-ws", 192),
        (1, "chat", 32),
        (1, "responses-ws", 32),
    ]


def test_no_load_of_a_run_has_the_prompts_of_another() -> None:
    words = parsed("--clients", "64", "16", "--apis", "chat", "responses-ws")
    seeds = [seed for run in range(3) for _, seed in options.seeded_loads(words, run)]
    assert seeds == list(range(12))


def test_all_clients_ask_at_once_where_each_asks_once() -> None:
    (load,) = options.loads(parsed("--clients", "5", "--requests-a-client", "1", "--processes", "8"))
    assert (load.requests, load.processes) == (5, 5)


def test_a_server_can_take_its_largest_load(tmp_path: Path) -> None:
    chosen = options.setup(parsed("--clients", "16", "256", "--output-tokens", "16", "128"), tmp_path)
    assert chosen.slots == 256
    assert chosen.kv_tokens_max >= 256 * (128 + 24)
    small = options.setup(parsed("--clients", "1"), tmp_path)
    assert (small.slots, small.kv_tokens_max) == (64, 16384), "the size of the engine does not follow small loads"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--server", "sglang", "--apis", "responses-ws"], "sglang has no responses-ws"),
        (["--pid", "4194999"], "there is no process 4194999"),
        (["--clients", "0"], "must be at least 1"),
        (["--starts", "0"], "must be at least 1"),
        (["--json", "/nowhere/a.json"], "--json: /nowhere/a.json: No such file or directory"),
    ],
)
def test_a_wrong_command_line_is_refused(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["cost", *words])
    assert complaint in capsys.readouterr().err


@pytest.mark.realtime
def test_a_load_that_fails_has_no_price() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(Failed, match="connection"):
        sample.measure_load(Load(clients=2, requests=2), url=url, model="tiny", roots=[], seed=0)


@pytest.mark.realtime
async def test_answers_without_text_have_no_price_and_no_first_token_after_0_ms() -> None:
    async def silent(asked: Asked) -> None:
        parts = (event(delta(finish="length")), event(usage(7, 128)), event("[DONE]"))
        await asked.send(HEAD, *map(chunk, parts), b"0\r\n\r\n")

    async with scripted(silent) as server:
        load = Load(clients=1, requests=1)
        measured = partial(sample.measure_load, load, url=server.url, model="m", roots=[], seed=0)
        with pytest.raises(Failed, match="no answer had any text"):
            await trio.to_thread.run_sync(measured)


@pytest.mark.realtime
async def test_the_price_of_a_token_of_our_simulated_server(tmp_path: Path) -> None:
    """In a thread, since the load runs in a loop of its own; the kernel ends a server together with its thread."""
    await trio.to_thread.run_sync(price, tmp_path)


def price(folder: Path) -> None:
    out = folder / "cost.json"
    words = ["cost", "--clients", "8", "--output-tokens", "32", "--apis", "chat", "responses-ws", "--json", str(out)]
    with started(SERVERS["espalier-simulated"], Setup(folder=folder, port=free_port())) as running:
        assert main([*words, "--url", running.url, "--pid", *map(str, running.root_pids)]) == 0
    samples = json.loads(out.read_text())["samples"]
    assert [each["load"]["api"] for each in samples] == ["chat", "responses-ws"]
    for each in samples:
        assert set(each["groups"]) == {"launcher", "node front", "node worker-0"}
        assert (each["requests"], each["tokens"], each["ended"]) == (32, 32 * 32, 0)
        spent = {group: one["user_s"] + one["system_s"] for group, one in each["groups"].items()}
        # A token costs microseconds, not milliseconds; less than nothing or all of a second is an error of the accounts.
        assert 0 < spent["node front"] / each["tokens"] < 0.005
        assert 0 < spent["node worker-0"] / each["tokens"] < 0.005
        assert spent["launcher"] <= spent["node front"]
        assert each["groups"]["node front"]["voluntary"] > 0
        assert 20 < each["groups"]["node front"]["memory_mb"] < 500
        assert each["gap_p50_ms"] >= 0
        assert each["ttft_p50_ms"] > 0
