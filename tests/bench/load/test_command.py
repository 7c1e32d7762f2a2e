"""The command from its words to its document, with worker processes of its own."""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import trio

from bench.load import command, report
from bench.load.messages import Done, Fault, Job, Record, Target
from bench.load.plan import Pace, PlannedRequest, Workload
from bench.load.process import ROOT, Run, split_job
from bench.load.requests import parse_url
from bench.load.worker import Worker
from bench.rig import result
from tests.rig.scripted_server import Asked, Scripted, nothing, scripted, whole


def parse(*words: str) -> Job:
    parser = argparse.ArgumentParser(exit_on_error=False)
    command.add(parser)
    return command.read(parser, parser.parse_args(["--model", "m", *words]))


def job(server: Scripted, **pace: Any) -> Job:
    target = Target(url=server.url, api="chat", model="m", timeout_s=20.0)
    workload = Workload(prompt_tokens=5, output_tokens=3)
    return Job(target=target, workload=workload, pace=Pace(**pace))


async def worked(job: Job) -> tuple[tuple[Fault, ...], Done]:
    """Return what a worker reports, from within this process."""
    worker = Worker(job)
    with trio.fail_after(120):
        return await worker.warm_up(), await worker.run(time.perf_counter())


async def test_a_closed_loop_sends_each_request_once_over_as_many_connections_as_clients() -> None:
    async with scripted(whole) as server:
        faults, done = await worked(job(server, clients=4, requests=30, warmup=5))
    assert faults == ()
    assert sorted(each.number for each in done.records) == list(range(30))
    assert all(each.fault is None for each in done.records)
    assert server.connections <= 8


@pytest.mark.parametrize(("warmup", "kept"), [(4, 4), (1, 1)])
async def test_clients_may_keep_the_connections_of_the_warm_up(warmup: int, kept: int) -> None:
    async with scripted(whole) as server:
        _, done = await worked(job(server, clients=4, requests=4, warmup=warmup, warm_connections=True))
    assert server.connections == 4
    assert sum(each.connect_s is None for each in done.records) == kept


@pytest.mark.realtime
async def test_requests_with_times_are_sent_then_whatever_the_others_do() -> None:
    async with scripted(nothing) as server:
        planned = tuple(PlannedRequest(number, "a", 2, 0.1 * number) for number in range(3))
        target = Target(url=server.url, api="chat", model="m", timeout_s=0.5)
        _, done = await worked(Job(target=target, workload=Workload(requests=planned), pace=Pace()))
    sent = sorted((each.number, each.sent_s) for each in done.records)
    assert [number for number, _ in sent] == [0, 1, 2]
    assert all(0.1 * number <= sent_s < 0.1 * number + 0.3 for number, sent_s in sent), "an answer takes 0.5 s"


@pytest.mark.realtime
async def test_a_duration_ends_a_closed_loop_after_its_running_requests() -> None:
    async with scripted(whole) as server:
        _, done = await worked(job(server, clients=2, duration_s=1.0))
    assert all(each.fault is None for each in done.records)
    assert sum(each.sent_s > 1.0 for each in done.records) <= 2, "each client may have begun one a moment before"
    assert len(done.records) > 4


# Processes --------------------------------------------------------------------------------


@pytest.mark.realtime
async def test_processes_share_a_load_and_their_samples_are_put_together() -> None:
    observed: list[int] = []
    async with scripted(whole) as server:
        several = split_job(job(server, clients=4, requests=20, warmup=2), 2)
        run = Run(several, observe=lambda: observed.append(len(server.bodies)))
        with trio.fail_after(120):
            await run.run()
    assert [each.number for each in run.records] == list(range(20))
    assert len(run.done) == 2
    assert all(each.sent_s >= 0 and each.output_tokens == 3 for each in run.records)
    assert observed == [2], "behind the warm-up and before the load"


@pytest.mark.realtime
async def test_a_run_that_is_stopped_has_the_results_so_far() -> None:
    async def first_alone(asked: Asked) -> None:
        await (whole(asked) if len(server.bodies) == 1 else nothing(asked))

    async with scripted(first_alone) as server, trio.open_nursery() as nursery:
        run = Run(split_job(job(server, clients=1, requests=5), 1))
        nursery.start_soon(run.run)
        with trio.fail_after(120):
            while len(server.bodies) < 2:  # noqa: ASYNC110  # the worker is another process
                await trio.sleep(0.01)
        run.stop()
    assert [each.number for each in run.records] == [0]


@pytest.mark.realtime
async def test_the_command_prints_a_table_and_writes_its_documents(tmp_path: Path) -> None:
    async with scripted(whole) as server:
        words = ["--url", server.url, "--model", "m", "--clients", "3", "--requests", "12", "--output-tokens", "4"]
        words += ["--quiet", "--key", "hush", "--json", str(tmp_path / "a.json"), "--raw", str(tmp_path / "a.jsonl")]
        with trio.fail_after(240):
            done = await trio.run_process(
                [sys.executable, "-m", "bench", "load", *words], cwd=ROOT, capture_stdout=True, capture_stderr=True
            )
    found = json.loads((tmp_path / "a.json").read_text())
    raw = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert "finished by length" in done.stdout.decode()
    assert done.stderr == b""
    assert found["requests"]["completed"] == len(raw) == 12
    assert found["latencies"]["ttft"]["count"] == 12
    assert found["latencies"]["itl"]["count"] == sum(len(each["stamps"]) - 1 for each in raw)
    assert "hush" not in (tmp_path / "a.json").read_text()
    assert len(result.read(tmp_path / "a.json").figures) == 2


# The report -------------------------------------------------------------------------------


def reported(record: Record, *, cpu_s: float = 0.1) -> dict[str, Any]:
    target = Target(url="http://h", api="chat", model="m", key="hush")
    run = Run([Job(target=target, workload=Workload(), pace=Pace(clients=1, requests=1))])
    run.done = [Done(wall_s=1.0, cpu_s=cpu_s, records=(record,))]
    return report.document(run.jobs[0], run, ("--key", "hush"), datetime.now(UTC))


def test_the_report_of_a_busy_client_warns_that_the_figures_are_its_own() -> None:
    busy = reported(Record(number=0, sent_s=0.0, ended_s=1.0), cpu_s=0.81)
    assert busy["notes"][0].startswith("SATURATED")
    assert report.text(busy).splitlines()[-2:] == busy["notes"]
    idle = reported(Record(number=0, sent_s=0.0, ended_s=1.0, output_tokens=1), cpu_s=0.79)
    assert idle["notes"] == []


def test_every_time_has_its_unit_and_no_figure_the_key() -> None:
    found = reported(Record(number=0, sent_s=0.0, ended_s=1.0))
    assert all({"unit", "count", "p99"} <= set(each) for each in found["latencies"].values())
    assert "hush" not in str(found)
    assert "1 answers came without usage" in found["notes"][0]
    assert found["title"] == "chat at http://h: 1 client"


# The command line -------------------------------------------------------------------------


def test_defaults_are_a_closed_loop_of_a_hundred_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    chosen = parse()
    assert (chosen.pace.clients, chosen.pace.requests, chosen.target.key) == (16, 100, "k")
    assert parse("--duration", "5").pace.requests is None


@pytest.mark.parametrize("words", [["--url", "localhost"], ["--url", "https://h"], ["--url", "http://h:99999"], ["--processes", "17"]])  # fmt: skip
def test_contradictory_options_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*words)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--duration", "0"),
        ("--duration", "nan"),
        ("--duration", "inf"),
        ("--output-tokens", "0"),
        ("--output-tokens", "a"),
        ("--clients", "0"),
    ],
)
def test_invalid_values_are_refused(option: str, value: str) -> None:
    with pytest.raises(argparse.ArgumentError):
        parse(option, value)


@pytest.mark.parametrize(
    ("url", "path", "port"),
    [
        ("http://h:1", "/v1/chat/completions", 1),
        ("http://h:1/v1/", "/v1/chat/completions", 1),
        ("http://h/api/v1", "/api/v1/chat/completions", 80),
        ("ws://h/v1/chat/completions?model=x", "/v1/chat/completions?model=x", 80),
        ("http://[::1]:80/proxy", "/proxy/v1/chat/completions", 80),
    ],
)
def test_a_url_may_be_a_root_a_version_or_an_endpoint(url: str, path: str, port: int) -> None:
    where = parse_url(url, "chat")
    assert (where.path, where.port) == (path, port)
