"""The tables of routing and of a cluster's cost, as Markdown, by the name of their place in docs/performance.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from bench.figures.routing_data import ClusterRun, PolicyFigures, RoutingData

PACED = "paced"  # the load of the table of policies
REFERENCE = "one engine"  # of `bench/policies.py`: that engine has all the memory, and the policy `kv`
NAMES = {REFERENCE: "one engine, `kv`"}
IDLE, OWN, OTHERS, BLOCKS = "idle", "asked by the gateway", "asked by others", "publishing blocks"
GATEWAY_BYTES, WORKER_BYTES = "bytes a second of the gateway", "bytes a second of a worker"
ALL_CPU, GATEWAY_CPU = "CPU of all, share of a core", "CPU of the gateway, share of a core"
TURNS = "turns of the gateway a second"
CHANGED, BLOCK_BYTES, BLOCK_CPU = "blocks stored or removed a second", "bytes a block", "CPU of the gateway a block, us"


def tables(data: RoutingData) -> dict[str, str]:
    """Return each table whose results are kept."""
    found = dict[str, str]()
    if data.policies:
        found["routing policies"] = policies(data)
    if data.scale:
        found["routing choices"] = choices(data)
    if data.cluster:
        found["cluster loads"] = cluster_loads(data.cluster)
        found["cluster blocks"] = cluster_blocks(data.cluster)
    return found


def policies(data: RoutingData) -> str:
    """Return what each policy finds on the paced load, medians of all rounds."""
    rows = [
        (str(run.engines), NAMES.get(name, f"`{name}`"), *_policy_cells(figures))
        for run in data.policies
        for name, figures in run.loads[PACED].items()
    ]
    return _table(
        ("engines", "policy", "prompt tokens cached", "TTFT p50", "p99", "tokens a second", "predicted"), rows
    )


def _policy_cells(figures: PolicyFigures) -> Iterable[str]:
    yield f"{100 * statistics.median(figures.hit_share):.1f} %"
    yield f"{statistics.median(figures.ttft_p50_ms):.0f} ms"
    yield f"{statistics.median(figures.ttft_p99_ms):.0f} ms"
    yield f"{statistics.median(figures.tokens_s):.0f}" if figures.tokens_s else ""
    yield f"{100 * figures.equal / figures.predicted:.1f} %" if figures.predicted else ""


def choices(data: RoutingData) -> str:
    """Return what a choice costs, by the number of workers."""
    columns = "workers", "requests", "a choice, mean", "p50", "p99", "blocks in the index", "blocks heard of a second"
    rows = [
        (
            f"{run.workers:,}",
            f"{int(str(run.run['requests'])):,}",
            *(f"{run.figures[name]:.0f} us" for name in ("decision_us", "decision_p50_us", "decision_p99_us")),
            *(_rounded(run.figures[name]) for name in ("index_blocks", "told_blocks_s")),
            f"{run.figures['most_shares']:.2f}",
        )
        for run in data.scale
    ]
    return _table((*columns, "busiest worker, in shares"), rows)


def cluster_loads(runs: Sequence[ClusterRun]) -> str:
    """Return what the loads of workers cost, by their number."""
    columns = (
        "workers",
        "links of a worker",
        "bytes a second of a worker, idle and asked by the gateway",
        OTHERS,
        f"{GATEWAY_BYTES}, {OTHERS}",
        f"CPU of all: {IDLE}, {OWN}, {OTHERS}",
        f"CPU of the gateway: {IDLE}, {OWN}, {OTHERS}",
        f"its turns a second: {IDLE}, {OTHERS}",
        "a routing decision",
    )
    rows = [
        (
            f"{run.workers:,}",
            f"{run.figures['links of a worker']:.0f}",
            _of(run, WORKER_BYTES, _whole, IDLE, OWN),
            _of(run, WORKER_BYTES, _whole, OTHERS),
            _of(run, GATEWAY_BYTES, _whole, OTHERS),
            _of(run, ALL_CPU, _share, IDLE, OWN, OTHERS),
            _of(run, GATEWAY_CPU, _share, IDLE, OWN, OTHERS),
            _of(run, TURNS, _whole, IDLE, OTHERS),
            f"{run.figures['a routing decision, ms']:.3f} ms",
        )
        for run in runs
    ]
    return _table(columns, rows)


def cluster_blocks(runs: Sequence[ClusterRun]) -> str:
    """Return what the blocks of workers cost, by the number of workers."""
    columns = "workers", CHANGED, WORKER_BYTES, GATEWAY_BYTES, BLOCK_BYTES, "CPU of the gateway", "a block", "of all"
    rows = [
        (
            f"{run.workers:,}",
            *(_of(run, name, _whole, BLOCKS) for name in (CHANGED, WORKER_BYTES, GATEWAY_BYTES)),
            _of(run, BLOCK_BYTES, "{:.1f}".format, BLOCKS),
            _of(run, GATEWAY_CPU, _share, BLOCKS),
            _of(run, BLOCK_CPU, "{:.1f} us".format, BLOCKS),
            _of(run, ALL_CPU, _share, BLOCKS),
            _of(run, TURNS, _whole, BLOCKS),
        )
        for run in runs
    ]
    return _table((*columns, "turns of the gateway a second"), rows)


def _of(run: ClusterRun, figure: str, form: Callable[[float], str], *periods: str) -> str:
    return ", ".join(form(run.figures[f"{period}: {figure}"]) for period in periods)


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _share(value: float) -> str:
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def _rounded(value: float) -> str:
    """Return a number with three digits that count."""
    return f"{float(f'{value:.3g}'):,.0f}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |".replace("  |", " |") for cells in (columns, *rows)]
    return "\n".join((lines[0], "|---" * len(columns) + "|", *lines[1:]))
