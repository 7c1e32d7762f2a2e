"""One load on a running server: the results of its clients, and the spending of its processes."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from bench.cost import accounts
from bench.cost.accounts import Accounts, Spent
from bench.cost.groups import APART
from bench.load import measure
from bench.load.messages import Api, Job, Target
from bench.load.plan import Pace, Workload
from bench.load.process import Failed, Run, run_to_end, split_job

PROMPT_TOKENS = 24  # of a load's prompts, roughly
CLIENT_SHARE_MAX = 0.8  # of a core, of one process of the load; beyond it the figures are the client's


@frozen(kw_only=True)
class Load:
    """A load: clients that each send their next request when they have the last answer."""

    api: Api = "chat"
    clients: int = 64
    output_tokens: int = 128  # of each answer, exactly
    requests: int = 192
    processes: int = 1  # of the clients
    warm: bool = False  # its connections are open and have been used

    @property
    def has_gaps(self) -> bool:
        """Whether its answers have a token behind the first."""
        return self.output_tokens > 1

    def job(self, url: str, model: str, seed: int, warmup: int) -> Job:
        """Return the task of the load's workers; another seed has other prompts."""
        return Job(
            target=Target(url=url, api=self.api, model=model, ignore_eos=True),
            workload=Workload(seed=seed, prompt_tokens=PROMPT_TOKENS, output_tokens=self.output_tokens),
            pace=Pace(clients=self.clients, requests=self.requests, warmup=warmup, warm_connections=self.warm),
        )


@frozen(kw_only=True)
class Sample:
    """The result of one load."""

    load: Load
    start: int  # of the server, from 0
    requests: int
    tokens: int  # by the server's usage
    events_per_token: float
    wall_s: float  # between the two accounts
    tokens_per_s: float  # from the first request to the last answer's end
    requests_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    gap_max_ms: float
    client_share: float  # of a core, of the busiest process of the load
    ended: int  # processes of the server that ended meanwhile
    groups: dict[str, Spent]

    @property
    def outside(self) -> Spent:
        """The sum of all groups but the engine's scheduler."""
        return accounts.total(each for group, each in self.groups.items() if group != APART)

    @property
    def everything(self) -> Spent:
        """The sum of all groups."""
        return accounts.total(self.groups.values())


def measure_load(load: Load, *, url: str, model: str, roots: Sequence[int], seed: int, start: int = 0) -> Sample:
    """Run a load and account for it, after a warm-up of one request for each client; raises `Failed`.

    The first accounts are taken between the warm-up, of which the server has some time to close the connections, and
    the start; the second after the last answer.
    """
    before: Accounts = {}
    jobs = split_job(load.job(url, model, seed, load.clients), load.processes)
    run = run_to_end(jobs, observe=lambda: before.update(accounts.take(roots)))
    after = accounts.take(roots, memory=True)
    records = run.records
    if not any(record.stamps for record in records) or not any(map(measure.tokens, records)):
        raise Failed("no answer had any text, so its tokens have no price")
    return _sample(load, start, run, before, after)


def _sample(load: Load, start: int, run: Run, before: Accounts, after: Accounts) -> Sample:
    records = run.records
    tokens, events = sum(map(measure.tokens, records)), sum(len(record.stamps) // 8 for record in records)
    rates, times = measure.rates(records, measure.window(records)), measure.latencies(records)
    assert run.start_at is not None
    return Sample(
        load=load,
        start=start,
        requests=len(records),
        tokens=tokens,
        events_per_token=events / tokens,
        wall_s=run.ended_at - run.start_at,
        tokens_per_s=rates["output_tokens_per_s"],
        requests_per_s=rates["requests_per_s"],
        ttft_p50_ms=times["ttft"].p50 or 0.0,
        ttft_p99_ms=times["ttft"].p99 or 0.0,
        gap_p50_ms=times["itl"].p50 or 0.0,
        gap_p99_ms=times["itl"].p99 or 0.0,
        gap_max_ms=times["itl"].most or 0.0,
        client_share=max(done.cpu_s / done.wall_s for done in run.done),
        ended=accounts.ended(before, after),
        groups=accounts.spent(before, after),
    )
