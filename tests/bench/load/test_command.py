"""The command from its words to its document, with worker processes of its own."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from bench.load import options, plan, report
from bench.load.messages import Done, Fault, Frames, Go, Job, Message, Progress, Ready, Record, Records, Target, encode
from bench.load.plan import Pace, Prompt, Span, Workload
from bench.load.process import ROOT, Run, WorkerDied, split_job
from bench.load.progress import describe
from bench.load.requests import parse_url
from bench.load.worker import Worker
from bench.rig import result
from tests.rig.scripted_server import Asked, Scripted, nothing, saying, scripted, whole

TRACE = "(the path of a trace)"


def parse(*words: str) -> options.Options:
    parser = argparse.ArgumentParser(exit_on_error=False)
    options.add(parser)
    return options.read(parser.parse_args(["--model", "m", *words]))


def job(server: Scripted, **pace: Any) -> Job:
    target = Target(url=server.url, api="chat", model="m", timeout_s=20.0)
    workload = Workload(prompt_tokens=Span(5, 5), output_tokens=Span(3, 3))
    return Job(target=target, workload=workload, pace=Pace(**pace))


async def worked(job: Job) -> list[Any]:
    """Return all that a worker says, from within this process."""
    messages: list[Message] = []

    async def say(message: Message) -> None:
        messages.append(message)

    worker = Worker(job, say)
    worker.go(Go(time.perf_counter()))
    with trio.fail_after(120):
        await worker.run()
    return messages


def records(messages: list[Any]) -> list[Any]:
    return sorted((r for m in messages if isinstance(m, Records) for r in m.records), key=lambda r: r.number)


# The worker -------------------------------------------------------------------------------


async def test_a_closed_loop_sends_each_request_once_over_as_many_connections_as_clients() -> None:
    async with scripted(whole) as server:
        messages = await worked(job(server, clients=4, requests=30, warmup=5))
    assert messages[0] == Ready(5, ())
    assert [each.number for each in records(messages)] == list(range(30))
    assert all(each.ending == "completed" for each in records(messages))
    assert isinstance(messages[-1], Done)
    assert (messages[-1].tokens, messages[-1].connections) == (90, 4)
    assert server.connections <= 8
    assert [m for m in messages if isinstance(m, Progress)][-1] == Progress(completed=30, tokens=90)


async def test_clients_may_keep_the_connections_of_the_warm_up() -> None:
    async with scripted(whole) as server:
        messages = await worked(job(server, clients=4, requests=4, warmup=4, warm_connections=True))
    assert server.connections == 4
    assert [each.connect_s for each in records(messages)] == [None] * 4
    assert messages[-1].connections == 4


async def test_clients_that_the_warm_up_has_none_of_open_their_own_connections() -> None:
    async with scripted(whole) as server:
        messages = await worked(job(server, clients=3, requests=3, warmup=1, warm_connections=True))
    assert server.connections == 3
    assert sum(each.connect_s is None for each in records(messages)) == 1


async def test_failures_of_the_warm_up_are_reported_and_not_counted() -> None:
    async with scripted(saying(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n")) as server:
        messages = await worked(job(server, clients=2, requests=1, warmup=2))
    assert messages[0] == Ready(2, (Fault("http", "500"),) * 2)
    assert len(records(messages)) == 1


@pytest.mark.realtime
async def test_an_open_loop_sends_when_planned_and_records_its_delay() -> None:
    async with scripted(whole) as server:
        messages = await worked(job(server, rate=200.0, requests=40))
    found = records(messages)
    planned = [at_s for _, at_s in plan.share(Pace(rate=200.0, requests=40), Workload(), 0, 1)]
    assert [each.planned_s for each in found] == planned
    assert all(0 <= each.lag_s <= each.sent_s - each.planned_s and each.held_s == 0.0 for each in found)


@pytest.mark.realtime
async def test_an_open_loop_holds_back_what_is_beyond_its_limit() -> None:
    running = peak = 0

    async def slow(asked: Asked) -> None:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await trio.sleep(0.02)
        running -= 1
        await whole(asked)

    async with scripted(slow) as server:
        messages = await worked(job(server, rate=1000.0, requests=20, concurrency_max=4))
    assert peak == 4
    assert max(each.held_s for each in records(messages)) > 0.05


@pytest.mark.realtime
async def test_a_duration_ends_a_closed_loop_after_its_running_requests() -> None:
    async with scripted(whole) as server:
        messages = await worked(job(server, clients=2, duration_s=1.0))
    found = records(messages)
    assert {each.ending for each in found} == {"completed"}
    assert sum(each.sent_s > 1.0 for each in found) <= 2, "each client may have begun one a moment before"
    assert len(found) > 4


# Processes --------------------------------------------------------------------------------


@pytest.mark.realtime
async def test_processes_share_a_load_and_their_samples_are_put_together() -> None:
    observed: list[int] = []
    async with scripted(whole) as server:
        several = split_job(job(server, clients=4, requests=20, warmup=2), 2)
        run = Run(several, observe=lambda: observed.append(len(server.bodies)))
        with trio.fail_after(120):
            await run.run()
    assert sorted(each.number for each in run.records) == list(range(20))
    assert sorted(run.done) == [0, 1]
    assert sum(done.tokens for done in run.done.values()) == 60
    assert run.total_progress.completed == 20
    assert all(each.sent_s >= 0 for each in run.records)
    assert observed == [2], "behind the warm-up and before the load"


@pytest.mark.realtime
async def test_a_run_that_is_stopped_has_the_results_so_far() -> None:
    async def first_alone(asked: Asked) -> None:
        await (whole(asked) if len(server.bodies) == 1 else nothing(asked))

    async with scripted(first_alone) as server, trio.open_nursery() as nursery:
        run = Run(split_job(job(server, clients=1, requests=5), 1))
        nursery.start_soon(run.run)
        with trio.fail_after(120):
            while not (run.total_progress.completed and run.total_progress.running):  # noqa: ASYNC110  # the worker is another process, and tells when it likes
                await trio.sleep(0.01)
        run.stop()
    assert [each.number for each in run.records] == [0]
    assert run.done[0].tokens == 3


@pytest.mark.realtime
async def test_a_worker_that_dies_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.load.process.COMMAND", (sys.executable, "-c", "raise SystemExit(3)"))
    async with scripted(whole) as server:
        with trio.fail_after(120), pytest.RaisesGroup(WorkerDied):
            await Run(split_job(job(server, clients=1, requests=1), 1)).run()


@pytest.mark.realtime
async def test_the_command_prints_a_table_and_writes_its_documents(tmp_path: Path) -> None:
    async with scripted(whole) as server:
        words = ["--url", server.url, "--model", "m", "--clients", "3", "--requests", "12", "--output-tokens", "2:6"]
        words += [
            "--quiet",
            "--key",
            "hush",
            "--json",
            str(tmp_path / "a.json"),
            "--raw",
            str(tmp_path / "a.jsonl"),
            "--html",
            str(tmp_path / "a.html"),
        ]
        with trio.fail_after(240):
            done = await trio.run_process(
                [sys.executable, "-m", "bench", "load", *words], cwd=ROOT, capture_stdout=True, capture_stderr=True
            )
    found = json.loads((tmp_path / "a.json").read_text())
    raw = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert "12 completed (12 length)" in done.stdout.decode()
    assert done.stderr == b""
    assert found["requests"]["completed"] == len(raw) == 12
    assert found["tokens"]["output"] == sum(each["output_tokens"] for each in raw)
    assert found["latencies"]["ttft"]["count"] == 12
    assert found["latencies"]["itl"]["count"] == sum(len(each["stamps"]) - 1 for each in raw)
    assert "hush" not in (tmp_path / "a.json").read_text()
    assert "Time between tokens" in (tmp_path / "a.html").read_text()
    assert {each.title for each in result.read(tmp_path / "a.json").figures} >= {"Time between tokens"}
    assert found["client"]["cpu_us_per_token"] > 0


def test_frames_are_the_same_wherever_they_are_cut() -> None:
    messages: list[Message] = [
        Job(target=Target(url="u", api="chat", model="m"), workload=Workload(), pace=Pace()),
        Go(1.5),
        Progress(),
    ]
    data = b"".join(map(encode, messages))
    for size in (1, 3, 7, len(data)):
        frames = Frames()
        assert [m for start in range(0, len(data), size) for m in frames.feed(data[start : start + size])] == messages
    with pytest.raises(ValueError, match="not a frame of a worker"):
        list(Frames().feed(b"Hello, world"))


# The report -------------------------------------------------------------------------------


def findings(*, cpu_s: float = 0.1, lags: Sequence[float] = (0.0,), found: Sequence[Record] = ()) -> report.Findings:
    pace, target = Pace(clients=1, requests=1), Target(url="http://h", api="chat", model="m", key="hush")
    return report.Findings(
        job=Job(target=target, workload=Workload(), pace=pace),
        processes=1,
        records=found,
        done=[Done(wall_s=1.0, cpu_s=cpu_s, tokens=100, lags=b"", connections=1)],
        lags_s=lags,
        warmup_faults=(),
        stopped=False,
        about={},
    )


def late(lag_s: float) -> Record:
    return Record(number=0, ending="completed", sent_s=0.0, ended_s=1.0, lag_s=lag_s)


def test_the_report_of_a_busy_client_warns_that_the_figures_are_its_own() -> None:
    words = "the client was saturated: figures are the client's"
    assert words in report.table(findings(cpu_s=0.81))
    assert words in report.table(findings(found=[late(0.011)]))
    assert words not in report.table(findings(cpu_s=0.79, found=[late(0.009)]))
    client: Any = report.document(findings(cpu_s=0.81))["client"]
    assert client["saturated"] is True


def test_the_report_has_the_delay_by_the_limit_on_concurrency() -> None:
    held = attrs.evolve(late(0.0), held_s=0.3)
    limited = attrs.evolve(findings(found=[held]), job=Job(
        target=Target(url="http://h", api="chat", model="m"), workload=Workload(),
        pace=Pace(rate=4.0, requests=1, concurrency_max=3),
    ))  # fmt: skip
    text = report.table(limited)
    assert "4 requests/s, Poisson, at most 3 at once" in text
    assert "HELD BACK: --concurrency-max held requests for p50 300.0 ms, p99 300.0 ms" in text
    assert "HELD BACK" not in report.table(findings(found=[attrs.evolve(held, held_s=0.001)]))
    assert "HELD BACK" not in report.table(findings())


def test_the_report_notes_that_the_client_was_kept_from_running() -> None:
    assert "kept from running" in report.table(findings(lags=[0.02] * 10))
    assert "kept from running" not in report.table(findings())


def test_every_figure_has_its_unit_and_its_definition_and_no_key() -> None:
    found: Any = report.document(findings(found=[late(0.0)]))
    assert all({"unit", "definition", "count", "p99"} <= set(each) for each in found["latencies"].values())
    assert "hush" not in str(found)
    assert found["tokens"]["requests_without_usage"] == 1


def test_the_document_says_in_its_notes_what_the_table_warns_of() -> None:
    found: Any = report.document(findings(cpu_s=0.81))
    assert found["notes"] == [line for line in report.table(findings(cpu_s=0.81)).splitlines() if "SATURATED" in line]
    assert (found["title"], found["sweep"].value) == ("chat at http://h: 1 client", 1.0)
    assert found["sweep"].series == "chat, h, 128 and 128 tokens"


def test_progress_is_a_line() -> None:
    line = describe(Progress(completed=5, failed=1, running=2, tokens=50), Pace(requests=12), 3.0, 1234.5)
    assert line == "[############............] 6/12 ended, 2 running, 1 FAILED, 1,234 tokens/s, 3 s"


# The command line -------------------------------------------------------------------------


def test_defaults_are_a_closed_loop_of_a_hundred_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    chosen = parse()
    assert (chosen.job.pace.clients, chosen.job.pace.requests, chosen.processes) == (16, 100, 1)
    assert chosen.job.target.key == "k"
    assert parse("--duration", "5").job.pace.requests is None
    assert parse("--rate", "5").job.pace.clients is None


@pytest.mark.parametrize(
    "words",
    [
        ["--url", "localhost"],
        ["--url", "ftp://h"],
        ["--url", "http://h:99999"],
        ["--cancel-by", "event"],
        ["--running-usage", "--api", "responses"],
        ["--concurrency-max", "3"],
        ["--warm-connections"],
        ["--rate", "3", "--warmup", "3", "--warm-connections"],
        ["--rate", "3", "--think-s", "1"],
        ["--processes", "17"],
        ["--processes", "300", "--rate", "3"],
        ["--prompts", "/nowhere"],
        ["--trace", "/nowhere"],
        ["--trace", TRACE, "--turns", "2"],
        ["--trace", TRACE, "--prefix-tokens", "9"],
        ["--trace", TRACE, "--clients", "2", "--trace-speed", "2"],
        ["--trace", TRACE, "--rate", "2", "--trace-speed", "2"],
        ["--trace", TRACE, "--think-s", "1"],
        ["--trace-speed", "2"],
        ["--burstiness", "2"],
        ["--prefixes", "2"],
        ["--turns", "1:2", "--api", "completions"],
        ["--turns", "2", "--api", "responses-ws", "--connections-a-client", "new"],
        ["--rate", "3", "--processes", "3", "--concurrency-max", "2"],
    ],
)
def test_contradictory_options_are_refused(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"timestamp": 5, "input_length": 9, "output_length": 3}\n')
    words = [str(tmp_path / "t.jsonl") if word == TRACE else word for word in words]
    with pytest.raises(options.Mistake):
        parse(*words)


@pytest.mark.parametrize(
    "words",
    [
        ["--rate", "0"],
        ["--rate", "nan"],
        ["--rate", "inf"],
        ["--cancel-rate", "1.5"],
        ["--output-tokens", "0"],
        ["--output-tokens", "9:3"],
        ["--output-tokens", "a"],
        ["--extra-body", "[]"],
        ["--extra-body", "{"],
        ["--temperature", "-1"],
        ["--clients", "0"],
    ],
)
def test_invalid_values_are_refused(words: list[str]) -> None:
    with pytest.raises(argparse.ArgumentError):
        parse(*words)


def test_a_prompts_file_is_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a", "max_tokens": 3}\n\n{"prompt": "b"}\n')
    assert parse("--prompts", str(file)).job.workload.prompts == (Prompt("a", 3), Prompt("b"))


@pytest.mark.parametrize("line", ["{", "3", "{}", '{"prompt": 3}', '{"prompt": "a", "max": 3}', '{"prompt": "a", "max_tokens": true}', ""])  # fmt: skip
def test_a_prompts_file_with_an_invalid_line_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(f"{line}\n")
    with pytest.raises(options.Mistake, match=r"p\.jsonl"):
        parse("--prompts", str(file))


def test_a_trace_sets_times_and_number_of_requests_unless_others_are_given(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"timestamp": 5, "input_length": 9, "output_length": 3}\n' * 3)
    traced = parse("--trace", str(file), "--trace-speed", "4").job.pace
    assert (traced.traced, traced.open_loop, traced.requests, traced.trace_speed) == (True, True, 3, 4.0)
    assert parse("--trace", str(file), "--requests", "9").job.pace.requests == 3
    closed = parse("--trace", str(file), "--clients", "2", "--requests", "9").job.pace
    assert (closed.open_loop, closed.clients, closed.requests) == (False, 2, 9)
    assert parse("--trace", str(file), "--rate", "2").job.pace.traced is False
    scaled = parse("--trace", str(file), "--trace-scale", "0.5").job.workload
    assert (len(scaled.trace), scaled.trace[0].prompt_tokens, scaled.block_tokens) == (3, 4, 256)


@pytest.mark.parametrize(
    ("url", "path", "port"),
    [
        ("http://h:1", "/v1/chat/completions", 1),
        ("http://h:1/v1/", "/v1/chat/completions", 1),
        ("https://h/api/v1", "/api/v1/chat/completions", 443),
        ("wss://h/v1/chat/completions?model=x", "/v1/chat/completions?model=x", 443),
        ("http://[::1]:80/proxy", "/proxy/v1/chat/completions", 80),
    ],
)
def test_a_url_may_be_a_root_a_version_or_an_endpoint(url: str, path: str, port: int) -> None:
    where = parse_url(url, "chat")
    assert (where.path, where.port) == (path, port)
