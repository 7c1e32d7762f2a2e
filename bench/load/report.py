"""The report of a run: a document with every figure, its unit and its definition, and a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from attrs import asdict, evolve, frozen

from bench.load import figures, measure
from bench.load.measure import DEFINITIONS, Summary
from bench.load.messages import Done, Fault, Job, Record
from bench.load.plan import Pace, Span, Workload
from bench.rig.result import Sweep

SCHEMA = "espalier.bench.load/1"
CPU_SHARE_MAX = 0.8
SEND_LAG_P99_MS_MAX = 10.0
LOOP_LAG_P99_MS_NOTED = 10.0
SECRET = "(not shown)"

Document = dict[str, object]


@frozen(kw_only=True)
class Findings:
    """The results of a run."""

    job: Job
    processes: int
    records: Sequence[Record]
    done: Sequence[Done]
    lags_s: Sequence[float]
    warmup_faults: Sequence[Fault]
    stopped: bool
    about: dict[str, object]  # the command line, versions, the machine, when


def client(findings: Findings) -> Document:
    """Return the client's own load, and whether it was saturated, so that the figures are not the server's."""
    shares = [done.cpu_s / done.wall_s for done in findings.done if done.wall_s > 0]
    tokens, cpu_s = sum(done.tokens for done in findings.done), sum(done.cpu_s for done in findings.done)
    send_lag = measure.summarise((r.lag_s for r in findings.records if r.lag_s is not None), 1e3)
    loop_lag = measure.summarise(findings.lags_s, 1e3)
    reasons = []
    if shares and max(shares) > CPU_SHARE_MAX:
        reasons.append(f"a process used {max(shares):.0%} of a core; take more --processes")
    if (send_lag.p99 or 0.0) > SEND_LAG_P99_MS_MAX:
        reasons.append(f"1 % of the requests were begun more than {send_lag.p99:.1f} ms late")
    return {
        "saturated": bool(reasons),
        "reasons": reasons,
        "processes": findings.processes,
        "cpu_share_of_a_core": shares,
        "cpu_s": cpu_s,
        "tokens_read": tokens,
        "cpu_us_per_token": cpu_s / tokens * 1e6 if tokens else None,
        "cpu_us_per_token_definition": "all CPU of the worker processes between start and end, requests and "
        "measuring included, over the tokens that they read",
        "connections_opened": sum(done.connections for done in findings.done),
        "send_lag": _figure("send_lag", send_lag),
        "held": _figure("held", measure.summarise((r.held_s for r in findings.records if r.held_s is not None), 1e3)),
        "loop_lag": _figure("loop_lag", loop_lag),
        "loop_was_late": (loop_lag.p99 or 0.0) > LOOP_LAG_P99_MS_NOTED,
    }


def _figure(name: str, summary: Summary) -> Document:
    return {"unit": "ms", "definition": DEFINITIONS[name], **asdict(summary)}


def document(findings: Findings) -> Document:
    """Return every figure."""
    records, pace = findings.records, findings.job.pace
    over = measure.window(records, None if findings.stopped else pace.duration_s)
    target = evolve(findings.job.target, key=SECRET if findings.job.target.key else None)
    given = findings.job.workload
    workload = asdict(evolve(given, prompts=(), trace=()))
    counted, own = tokens(records), client(findings)
    return {
        "schema": SCHEMA,
        "title": f"{target.api} at {target.url}: {pace_words(pace)}",
        **findings.about,
        "notes": _warnings(findings, own),
        "figures": figures.figures(records, over, counted),
        "sweep": _sweep(findings, over),
        "settings": {
            "target": asdict(target),
            "workload": workload | {"prompts": len(given.prompts), "trace": len(given.trace)},
            "pace": asdict(pace),
            "processes": findings.processes,
        },
        "stopped_early": findings.stopped,
        "warmup": {"requests": pace.warmup, "failed": len(findings.warmup_faults)},
        "window": {"unit": "s", "length": over.length_s, "definition": _window_words(findings)},
        "requests": {"sent": len(records), **asdict(measure.endings(records))},
        "errors": [asdict(each) for each in measure.errors(records)],
        "tokens": counted,
        "rates": {
            "unit": "1/s",
            "definition": "within the window: requests that completed; tokens that came, of cancelled "
            "requests too; prompt tokens of the requests that completed",
            **measure.rates(records, over),
        },
        "latencies": {name: _figure(name, summary) for name, summary in measure.latencies(records).items()},
        "percentiles": "exact, of all samples of all processes, linear between the two nearest",
        "client": own,
    }


def _sweep(findings: Findings, over: measure.Window) -> Sweep:
    target, pace = findings.job.target, findings.job.pace
    rates, times = measure.rates(findings.records, over), measure.latencies(findings.records)
    x, value = "clients", float(pace.clients or 0)
    if pace.rate is not None:
        x, value = "requests/s planned", pace.rate
    elif pace.traced:
        x, value = "speed of the trace", pace.trace_speed
    return Sweep(
        x=x,
        value=value,
        series=f"{target.api}, {urlsplit(target.url).netloc}{_lengths(findings.job.workload)}",
        measures={
            "output tokens": ("tokens/s", rates["output_tokens_per_s"]),
            "requests": ("requests/s", rates["requests_per_s"]),
            "time to the first token, p50": ("ms", times["ttft"].p50),
            "time to the first token, p99": ("ms", times["ttft"].p99),
            "time between tokens, p50": ("ms", times["itl"].p50),
            "time between tokens, p99": ("ms", times["itl"].p99),
        },
    )


def _window_words(findings: Findings) -> str:
    if findings.job.pace.duration_s is not None and not findings.stopped:
        return "the duration that was asked for; what still ran at its end was waited for"
    return "from the first request's sending to the last one's end"


def tokens(records: Sequence[Record]) -> Document:
    """Return the numbers of tokens, and whether the server or the client counted them."""
    completed = [record for record in records if record.ending == "completed"]
    with_usage = [record for record in completed if record.output_tokens is not None]
    events = sum(len(record.stamps) // 8 for record in with_usage)
    output = sum(record.output_tokens or 0 for record in with_usage)
    return {
        "prompt": sum(record.prompt_tokens or 0 for record in completed),
        "cached": sum(record.cached_tokens or 0 for record in completed),
        "output": sum(measure.tokens(record) for record in completed),
        "definition": "of completed requests, by the server's usage; where it says none, an event counts as a token",
        "requests_without_usage": len(completed) - len(with_usage),
        "tokens_per_event": output / events if events else None,
        "shorter_than_wanted": sum(measure.tokens(record) < record.wanted_tokens for record in completed),
    }


# The table --------------------------------------------------------------------------------


def table(findings: Findings) -> str:
    """Return the same as text, the most important first and warnings last."""
    records, pace, own = findings.records, findings.job.pace, client(findings)
    workload = findings.job.workload
    over = measure.window(records, None if findings.stopped else pace.duration_s)
    lines = [
        f"{findings.job.target.api} at {findings.job.target.url}: {pace_words(pace)}",
        f"          {findings.processes} process(es), seed {workload.seed}{_prompts(workload)}",
        *_ended(records),
        *_errors(records),
        _rates(measure.rates(records, over), over.length_s),
        "",
        *_latencies(measure.latencies(records)),
        *_tokens(tokens(records)),
        *_client(own),
        *_warnings(findings, own),
    ]
    return "\n".join(lines)


def pace_words(pace: Pace) -> str:
    """Return when requests are sent, in words."""
    if pace.traced:
        words = f"the times of a trace, {pace.trace_speed:g} times as fast"
    elif pace.rate is not None:
        words = f"{pace.rate:g} requests/s, " + ("Poisson" if pace.burstiness == 1 else f"gamma {pace.burstiness:g}")
    else:
        words = "1 client" if pace.clients == 1 else f"{pace.clients} clients"
    return words if pace.concurrency_max is None else f"{words}, at most {pace.concurrency_max} at once"


def _warnings(findings: Findings, own: Document) -> list[str]:
    """Return what a reader of the figures must know, most important first."""
    lines = []
    if own["saturated"]:
        reasons = own["reasons"]
        assert isinstance(reasons, list)
        lines.append(f"SATURATED: the client was saturated: figures are the client's. {'; '.join(reasons)}")
    elif own["loop_was_late"]:
        lines.append("NOTE: the client was kept from running for longer than 10 ms at times; its processor is shared")
    held = own["held"]
    assert isinstance(held, dict)
    if (held["p99"] or 0.0) > SEND_LAG_P99_MS_MAX:
        lines.append(
            f"HELD BACK: --concurrency-max held requests for p50 {held['p50']:.1f} ms, p99 {held['p99']:.1f} ms, "
            "which is in none of the times above"
        )
    if findings.warmup_faults:
        first, warmup = findings.warmup_faults[0], findings.job.pace.warmup
        lines.append(f"WARM-UP: {len(findings.warmup_faults)} of {warmup} failed: {first.kind} {first.code}")
    if findings.stopped:
        lines.append("STOPPED EARLY: what still ran is not counted")
    return lines


def _prompts(workload: Workload) -> str:
    """Return what is special about the prompts, in words."""
    words = [f"{len(workload.trace)} lines of a trace"] if workload.trace else []
    if workload.prefixes:
        words.append(f"{workload.prefixes} shared beginning(s) of {_span(workload.prefix_tokens)} tokens")
    if workload.turns.most > 1:
        words.append(f"conversations of {_span(workload.turns)} turns")
    return "".join(f", {each}" for each in words)


def _lengths(workload: Workload) -> str:
    """Return what tells workloads apart whose figures are no repetitions of each other, in words."""
    if workload.trace:
        return _prompts(workload)
    prompt, output = _span(workload.prompt_tokens), _span(workload.output_tokens)
    return f", {prompt} and {output} tokens{_prompts(workload)}"


def _span(span: Span) -> str:
    return f"{span.least}" if span.least == span.most else f"{span.least} to {span.most}"


def _ended(records: Sequence[Record]) -> list[str]:
    ends = measure.endings(records)
    finishes = ", ".join(f"{count} {name}" for name, count in sorted(ends.finishes.items()))
    lines = [f"requests  {len(records)}: {ends.completed} completed" + (f" ({finishes})" if finishes else "")]
    if ends.planned_cancels:
        lines.append(
            f"          {ends.cancelled} left as planned ({ends.cancelled_before_first} before the first token); "
            f"{ends.finished_first} of {ends.planned_cancels} that were to leave had their answer first"
        )
    if ends.failed:
        lines.append(f"          {ends.failed} FAILED")
    return lines


def _errors(records: Sequence[Record]) -> list[str]:
    return [f"  {e.count:>6} x {e.kind}: {e.code}: {e.example}".rstrip(": ") for e in measure.errors(records)]


def _rates(rates: dict[str, float], length_s: float) -> str:
    return (
        f"rates     {rates['requests_per_s']:,.2f} requests/s, {rates['output_tokens_per_s']:,.1f} output tokens/s, "
        f"{rates['prompt_tokens_per_s']:,.1f} prompt tokens/s over {length_s:.2f} s"
    )


def _latencies(summaries: dict[str, Summary]) -> list[str]:
    rows = [_row(name, summary) for name, summary in summaries.items() if summary.count]
    head = f"{'ms':<8}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}{'mean':>10}{'samples':>10}"
    return [head, *rows, ""] if rows else []


def _row(name: str, summary: Summary) -> str:
    cells = "".join(f"{value:>10.2f}" for value in (summary.p50, summary.p90, summary.p99, summary.most, summary.mean))
    return f"{name:<8}{cells}{summary.count:>10}"


def _tokens(counts: Document) -> list[str]:
    per_event, without = counts["tokens_per_event"], counts["requests_without_usage"]
    prompt = f"{counts['prompt']} prompt ({counts['cached']} cached)"
    lines = [f"tokens    {prompt}, {counts['output']} output, of completed requests"]
    if isinstance(per_event, float) and abs(per_event - 1) > 0.01:
        lines.append(
            f"          {per_event:.2f} tokens an event: itl is the gap between events, tpot that between tokens"
        )
    if without:
        lines.append(f"          {without} answers came without usage: their events are counted as tokens")
    if counts["shorter_than_wanted"]:
        lines.append(f"          {counts['shorter_than_wanted']} answers are shorter than asked for (see --ignore-eos)")
    return lines


def _client(own: Document) -> list[str]:
    shares, loop, lag = own["cpu_share_of_a_core"], own["loop_lag"], own["send_lag"]
    assert isinstance(shares, list)
    assert isinstance(loop, dict)
    assert isinstance(lag, dict)
    words = [f"{max(shares, default=0.0):.0%} of a core at most"]
    if isinstance(per_token := own["cpu_us_per_token"], float):
        words.append(f"{per_token:.1f} us of CPU a token")
    if loop["count"]:
        words.append(f"loop late by p99 {loop['p99']:.2f} ms, max {loop['most']:.2f} ms")
    if lag["count"]:
        words.append(f"requests late by p99 {lag['p99']:.2f} ms")
    return [f"client    {', '.join(words)}"]
