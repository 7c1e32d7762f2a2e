"""The whole system under a seed: every answer is right or ends in an allowed error, and all is released at the end.

Each kind of fault is dealt to some of the seeds (`fault_plan.py`), so that few seeds have all of them.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from actors.kit.groups import first_leaf
from tests.system.hunt import Seeds
from tests.system.simulator.caches import CacheLife
from tests.system.simulator.cluster_seed import run_cluster_seed
from tests.system.simulator.faults import CLUSTER_FAULTS, FAULTS
from tests.system.simulator.picture_faults import PICTURE_FAULTS
from tests.system.simulator.prefix_plan import SHARES, SPOILS
from tests.system.simulator.release_times import DELAYS, KEEPS
from tests.system.simulator.seed import run_seed
from tests.system.simulator.two_gateways import run_gateways_seed

ROOT = Path(__file__).parents[3]
SEEDS = 20  # `make nightly` and `make hunt` run thousands
CLUSTER_SEEDS = 12
GATEWAY_SEEDS = 4
SEEDS_MAX = 60  # until all outcomes are seen
PREFIXES = re.compile(r"'prefixes', (\d+), (\d+), \d+, '(\w*)', (\d+)\)")
GONE = re.compile(r"'gone', ([^)]+)\)")  # and what made it late


def check(run: Callable[..., str], seed: int, kind: str = "") -> None:
    """Run a seed; if it fails, print the line that runs it again."""
    try:
        run(seed, planned=True)
    except BaseException:
        print(Seeds(kind, planned=True).replay(seed))  # noqa: T201  # pytest shows it
        raise


def traces_with(outcomes: Sequence[str], run: Callable[..., str], seeds: int) -> str:
    """Return the traces of seeds; further ones follow until each outcome is seen, since chance decides on these."""
    traces = "".join(run(seed, planned=True) for seed in range(seeds))
    while unseen := [outcome for outcome in outcomes if outcome not in traces]:
        assert seeds < SEEDS_MAX, unseen
        traces += run(seeds, planned=True)
        seeds += 1
    return traces


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_answer_is_right_or_ends_in_an_allowed_error_and_all_is_released(seed: int) -> None:
    check(run_seed, seed)


def test_a_seed_gives_the_same_trace_in_every_process() -> None:
    traces = []
    for hash_seed in "12":
        command = [sys.executable, "-m", "tests.system.hunt", "--planned", "--only", "3"]
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        traces.append(subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True).stdout)
    assert traces[0] == traces[1] == f"{run_seed(3, planned=True)}\n".encode()


def test_the_seeds_see_every_fault() -> None:
    traces = "".join(run_seed(seed, planned=True) for seed in range(SEEDS))
    assert [kind for kind in (*FAULTS, *PICTURE_FAULTS, "drain") if repr(kind) not in traces] == []


def test_the_seeds_see_every_outcome() -> None:
    ends = ("tls", "plain", "left", "whole", "engine_refused", "cancelled", "completed", "deaf", "garbled")
    codes = ("link_lost", "engine_lost", "actor_lost", "deadline_exceeded", "overloaded", "draining")
    of_pictures = ("whole", "completed", "left", "invalid_request", "unsupported_parameter")
    outcomes = [*map(repr, ends), *map(repr, codes), *(f"'picture', {end!r}" for end in of_pictures)]
    traces = traces_with(outcomes, run_seed, SEEDS)
    late = {kind for each in GONE.findall(traces) for kind in ast.literal_eval(f"[{each}]")}
    assert late == DELAYS | KEEPS, "clients that leave meet every fault that keeps slots"


def test_the_seeds_see_prompts_in_caches_and_every_way_in_which_events_are_spoiled() -> None:
    seen = PREFIXES.findall("".join(run_seed(seed, planned=True) for seed in range(SEEDS)))
    counts = [(int(expected), int(reused), kind, int(spoiled)) for expected, reused, kind, spoiled in seen]
    assert len(counts) > SEEDS // 5
    assert sum(expected for expected, *_ in counts) > 0
    assert sum(reused for _, reused, *_ in counts) > 0
    assert {kind for *_, kind, spoiled in counts if spoiled} == {*SPOILS}


def test_the_seeds_see_operations_that_are_carried_out_refused_and_left() -> None:
    # Of fifty seeds one ends an update that it has begun, too few to wait for.
    names = ("release-memory", "resume-memory", "update-weights-from-disk", "begin-weights-update")
    refused = [f"'{name}', 'invalid_request'" for name in ("release-memory", "resume-memory", "end-weights-update")]
    done = [f"'{name}', 'done'" for name in names]
    traces_with([*done, *refused, "', 'left')"], run_seed, SEEDS)


# Clusters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(CLUSTER_SEEDS))
def test_every_answer_by_a_cluster_is_right_or_ends_in_an_allowed_error_and_all_is_released(seed: int) -> None:
    check(run_cluster_seed, seed, "cluster")


def test_what_a_check_finds_in_an_actor_is_raised_and_not_what_clients_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHARES, "prefixes", 1.0)
    monkeypatch.setattr(CacheLife, "had", lambda *_: False)  # so often that an actor of this seed falls
    with pytest.raises(ExceptionGroup) as caught:
        run_cluster_seed.__wrapped__(80237)
    assert str(first_leaf(caught.value)) == "a block is expected that is not there"


def test_the_seeds_of_clusters_see_every_fault_and_resumed_answers() -> None:
    ends = ("whole", "left", "back", "front crash", "drain", "resumed", "encode link_lost")
    shape = ("prefill ", "decode ", "both ", "encode ", " simulated")
    outcomes = [*shape, "'picture', 'whole'", "'picture', 'completed'", *(f"'{end}'" for end in ends)]
    traces = traces_with(outcomes, run_cluster_seed, CLUSTER_SEEDS)
    assert [kind for kind in CLUSTER_FAULTS if repr(kind) not in traces] == []


def test_a_seed_of_a_cluster_gives_the_same_trace_again() -> None:
    assert run_cluster_seed.__wrapped__(3, planned=True) == run_cluster_seed(3, planned=True)


# Two gateways ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(GATEWAY_SEEDS))
def test_every_answer_by_two_gateways_is_right_or_ends_in_an_allowed_error_and_all_is_released(seed: int) -> None:
    check(run_gateways_seed, seed, "gateways")


def test_the_seeds_of_two_gateways_see_restarts_of_one_and_whole_answers() -> None:
    outcomes = ("'gateway drains'", "'gateway back'", "'whole'", "'completed'", "prefill ", "decode ", "both ")
    traces_with(outcomes, run_gateways_seed, GATEWAY_SEEDS)
