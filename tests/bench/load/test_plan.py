"""What is sent and when depends on the seed, and on nothing else."""

import math
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.plan import (
    EarlyDisconnect,
    Pace,
    Prompt,
    Span,
    TracedRequest,
    Workload,
    arrivals,
    clients_per_worker,
    conversation,
    planned_request,
    planned_requests,
    share,
    warmup_share,
)

ROOT = Path(__file__).parents[3]


def test_a_request_is_the_same_every_time_and_in_every_process() -> None:
    workload = Workload(seed=7, output_tokens=Span(1, 100), cancel_rate=0.5)
    code = "from bench.load.plan import *; print(hash(str(planned_request(Workload(seed=7,output_tokens=Span(1,100),cancel_rate=.5),5))))"
    code = code.replace("hash(", "(")  # text: what a hash says differs between processes
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.strip() == str(planned_request(workload, 5))


def test_another_seed_and_another_number_give_another_prompt() -> None:
    prompts = {planned_request(Workload(seed=seed), number).prompt for seed in range(3) for number in range(-2, 3)}
    assert len(prompts) == 15


def test_a_prompt_has_as_many_words_as_tokens_are_wanted() -> None:
    assert len(planned_request(Workload(prompt_tokens=Span(33, 33)), 0).prompt.split()) == 33


@given(st.integers(1, 50), st.integers(0, 50), st.integers())
def test_lengths_lie_within_their_span_and_reach_its_ends(least: int, more: int, seed: int) -> None:
    span = Span(least, least + more)
    found = {planned_request(Workload(seed=seed, output_tokens=span), number).output_tokens for number in range(20)}
    assert all(span.least <= each <= span.most for each in found)


def test_both_ends_of_a_span_are_drawn() -> None:
    drawn = {planned_request(Workload(output_tokens=Span(3, 5)), number).output_tokens for number in range(100)}
    assert drawn == {3, 4, 5}


def test_prompts_of_a_file_come_in_turn_with_their_own_length() -> None:
    workload = Workload(prompts=(Prompt("a", 5), Prompt("b")), output_tokens=Span(9, 9))
    asks = [planned_request(workload, number) for number in range(3)]
    assert [(each.prompt, each.output_tokens) for each in asks] == [("a", 5), ("b", 9), ("a", 5)]


def test_the_share_of_early_disconnects_is_as_asked_and_half_come_before_the_first_token() -> None:
    workload = Workload(cancel_rate=0.3, output_tokens=Span(64, 64), cancel_within_s=0.2)
    leaves = [planned_request(workload, number).leave for number in range(4000)]
    gone = [each for each in leaves if each is not None]
    early = [each.after_s or 0.0 for each in gone if each.tokens == 0]
    assert len(gone) == pytest.approx(1200, rel=0.1)
    assert len(early) == pytest.approx(600, rel=0.15)
    assert all(0.0002 <= each <= 0.2 for each in early)
    assert sum(each < 0.002 for each in early) == pytest.approx(len(early) / 3, rel=0.2)  # of three magnitudes
    assert all(1 <= each.tokens < 64 and each.after_s is None for each in gone if each.tokens)


def test_no_client_disconnects_in_the_warm_up_or_after_the_last_token() -> None:
    workload = Workload(cancel_rate=1.0, output_tokens=Span(1, 1))
    assert planned_request(workload, -1).leave is None
    assert all(
        isinstance(leave := planned_request(workload, n).leave, EarlyDisconnect) and leave.tokens == 0
        for n in range(50)
    )


# Poisson ----------------------------------------------------------------------------------


def test_gaps_between_arrivals_are_exponential() -> None:
    rate, count = 50.0, 20_000
    times = list(islice(arrivals(1, rate), count))
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / count
    variance = sum((gap - mean) ** 2 for gap in gaps) / count
    assert mean == pytest.approx(1 / rate, rel=0.03)
    assert math.sqrt(variance) == pytest.approx(mean, rel=0.03)  # as a Poisson process alone has
    below_mean = sum(gap < 1 / rate for gap in gaps) / count
    assert below_mean == pytest.approx(1 - math.exp(-1), abs=0.01)


def test_counts_in_equal_windows_have_a_variance_equal_to_their_mean() -> None:
    counts = [0] * 1000
    for at_s in arrivals(3, 20.0):
        if at_s >= 1000:
            break
        counts[int(at_s)] += 1
    mean = sum(counts) / 1000
    assert mean == pytest.approx(20, rel=0.03)
    assert sum((count - mean) ** 2 for count in counts) / 1000 == pytest.approx(mean, rel=0.15)


@given(st.integers(1, 7), st.integers(0, 100), st.booleans())
def test_workers_together_send_each_request_once(workers: int, requests: int, open_loop: bool) -> None:
    pace = Pace(rate=5.0 if open_loop else None, requests=requests)
    parts = [list(share(pace, Workload(seed=9), worker, workers)) for worker in range(workers)]
    assert sorted(each for part in parts for each in part) == list(share(pace, Workload(seed=9), 0, 1))
    assert [number for number, _ in share(pace, Workload(seed=9), 0, 1)] == list(range(requests))


def test_a_duration_ends_the_arrivals() -> None:
    times: list[Any] = [at_s for _, at_s in share(Pace(rate=100.0, duration_s=2.0), Workload(seed=1), 0, 1)]
    assert times == sorted(times)
    assert 150 < len(times) < 250
    assert times[-1] < 2.0


@given(st.integers(1, 5), st.integers(0, 40))
def test_workers_share_clients_and_the_warm_up_without_rest(workers: int, total: int) -> None:
    assert sum(clients_per_worker(total, worker, workers) for worker in range(workers)) == total
    numbers = [n for worker in range(workers) for n in warmup_share(Pace(warmup=total), worker, workers)]
    assert sorted(numbers, reverse=True) == list(range(-1, -1 - total, -1))


# Gamma and traces -------------------------------------------------------------------------


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_gaps_of_a_gamma_process_have_its_mean_and_its_variance(burstiness: float) -> None:
    times = list(islice(arrivals(1, 50.0, burstiness), 20_000))
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.05)
    assert variance / mean**2 == pytest.approx(1 / burstiness, rel=0.1)


TRACE = (
    TracedRequest(0.0, 1030, 5, (1, 2, 3)),
    TracedRequest(1.0, 1030, 0, (1, 2, 4)),
    TracedRequest(3.0, 700, 7, (1,)),
)


def test_a_trace_gives_its_times_at_its_speed_and_its_lengths() -> None:
    workload, pace = Workload(trace=TRACE), Pace(traced=True, trace_speed=2.0)
    assert list(share(pace, workload, 0, 1)) == [(0, 0.0), (1, 0.5), (2, 1.5)]
    requests = [planned_request(workload, number) for number in range(4)]
    assert [each.output_tokens for each in requests] == [5, 1, 7, 5]
    assert [len(each.prompt.split()) for each in requests] == [1030, 1030, 700, 1030]


def test_prompts_of_a_trace_share_as_many_tokens_as_they_share_blocks() -> None:
    first, second, third = (planned_request(Workload(trace=TRACE), number).prompt.split() for number in range(3))
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:]
    assert first[:512] == third[:512]
    assert first[512:700] != third[512:]
    assert planned_request(Workload(trace=TRACE, seed=1), 0).prompt.split() != first


def test_the_warm_up_of_a_trace_has_its_lengths_and_none_of_its_blocks() -> None:
    warm_up = planned_request(Workload(trace=TRACE), -3).prompt.split()
    assert len(warm_up) == 1030
    assert warm_up[:100] != planned_request(Workload(trace=TRACE), 0).prompt.split()[:100]


def test_a_rate_or_clients_replace_the_times_of_a_trace() -> None:
    workload = Workload(trace=TRACE)
    assert list(share(Pace(clients=1, requests=2), workload, 0, 1)) == [(0, None), (1, None)]
    assert len(list(share(Pace(rate=9.0, requests=5), workload, 0, 1))) == 5


# Shared beginnings and conversations ------------------------------------------------------


def test_prompts_share_as_many_beginnings_as_there_are_prefixes() -> None:
    workload = Workload(prefixes=3, prefix_tokens=Span(20, 20), prompt_tokens=Span(5, 5))
    prompts = [planned_request(workload, number).prompt.split() for number in range(60)]
    assert {len(prompt) for prompt in prompts} == {25}
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 3
    alone = [planned_request(Workload(prompt_tokens=Span(5, 5)), number).prompt.split() for number in range(60)]
    assert [prompt[20:] for prompt in prompts] == alone


def test_a_conversation_has_its_turns_and_only_the_first_is_due_at_a_time() -> None:
    workload = Workload(turns=Span(2, 4), prefixes=1, prefix_tokens=Span(9, 9), prompt_tokens=Span(5, 5))
    conversations = [list(conversation(workload, number, 1.0)) for number in range(30)]
    assert {len(each) for each in conversations} == {2, 3, 4}
    assert all([each.turn for each in one] == list(range(len(one))) for one in conversations)
    assert all([each.at_s for each in one] == [1.0, *[None] * (len(one) - 1)] for one in conversations)
    assert all([len(each.prompt.split()) for each in one] == [14, *[5] * (len(one) - 1)] for one in conversations)
    assert planned_requests(Pace(requests=30), workload) == sum(map(len, conversations))
    assert list(conversation(Workload(), 3, 2.0)) == [planned_request(Workload(), 3, 2.0)]
    assert planned_requests(Pace(duration_s=1.0), workload) is None
