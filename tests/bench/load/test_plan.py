"""What is sent depends on the seed, and on nothing else."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from bench.load.plan import (
    Pace,
    PlannedRequest,
    Workload,
    clients_per_worker,
    planned_request,
    share,
    warmup_share,
)

ROOT = Path(__file__).parents[3]


def test_a_request_is_the_same_every_time_and_in_every_process() -> None:
    workload = Workload(seed=7)
    code = "from bench.load.plan import *; print(planned_request(Workload(seed=7), 5))"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.strip() == str(planned_request(workload, 5))


def test_another_seed_and_another_number_give_another_prompt() -> None:
    prompts = {planned_request(Workload(seed=seed), number).prompt for seed in range(3) for number in range(-2, 3)}
    assert len(prompts) == 15


def test_a_prompt_has_as_many_words_as_tokens_are_wanted() -> None:
    assert len(planned_request(Workload(prompt_tokens=33), 0).prompt.split()) == 33


def test_given_requests_are_sent_as_they_are_behind_a_random_warm_up() -> None:
    given_requests = tuple(PlannedRequest(number, f"prompt {number}", 2, 0.5 * number) for number in range(3))
    workload = Workload(requests=given_requests)
    assert tuple(share(Pace(), workload, 0, 1)) == given_requests
    assert list(share(Pace(), workload, 1, 2)) == [given_requests[1]]
    assert planned_request(workload, -1) == planned_request(Workload(), -1)


@given(st.integers(1, 7), st.integers(0, 100))
def test_workers_together_send_each_request_once(workers: int, requests: int) -> None:
    parts = [share(Pace(clients=1, requests=requests), Workload(), worker, workers) for worker in range(workers)]
    assert sorted(each.number for part in parts for each in part) == list(range(requests))
    assert [each.number for each in islice(share(Pace(clients=1), Workload(), 1, 3), 3)] == [1, 4, 7]


@given(st.integers(1, 5), st.integers(0, 40))
def test_workers_share_clients_and_the_warm_up_without_rest(workers: int, total: int) -> None:
    assert sum(clients_per_worker(total, worker, workers) for worker in range(workers)) == total
    numbers = [n for worker in range(workers) for n in warmup_share(Pace(warmup=total), worker, workers)]
    assert sorted(numbers, reverse=True) == list(range(-1, -1 - total, -1))
