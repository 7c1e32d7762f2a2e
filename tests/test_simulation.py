"""The whole system under a seed: faults, then health; nothing false on the way, and everything home at the end."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.faults import FAULTS
from tests.sim.freeing import DELAYS, KEEPS
from tests.sim.seed import run_seed

ROOT = Path(__file__).parent.parent
SEEDS = 200
GONE = re.compile(r"'gone', ([^)]+)\)")  # and what made it late


def replay(seed: int) -> str:
    """Return the line that runs one seed again."""
    return f"seed {seed}: python -m tests.hunt --only {seed}"


@pytest.mark.parametrize("tens", range(SEEDS // 10))
def test_nothing_false_is_said_and_everything_comes_home(tens):
    for seed in range(10 * tens, 10 * tens + 10):
        try:
            run_seed(seed)
        except BaseException:
            print(replay(seed))  # noqa: T201  # pytest shows it
            raise


def test_a_seed_decides_everything_whatever_the_process():
    traces = []
    for hash_seed in "12":
        command = [sys.executable, "-m", "tests.hunt", "--first", "0", "--seeds", "8", "--traces"]
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        traces.append(subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True).stdout)
    assert traces[0] == traces[1] == "".join(f"{run_seed(seed)}\n" for seed in range(8)).encode()


def test_the_seeds_see_every_fault_and_every_outcome():
    traces = "".join(run_seed(seed) for seed in range(SEEDS))
    for kind in (
        *FAULTS,
        "tls",
        "plain",
        "drain",
        "left",
        "whole",
        "engine_refused",
        "cancelled",
        "completed",
        "deaf",
        "garbled",
    ):
        assert repr(kind) in traces, kind
    late = {kind for each in GONE.findall(traces) for kind in ast.literal_eval(f"[{each}]")}
    assert late == DELAYS | KEEPS, "who leaves meets everything that keeps slots"
    for code in ("link_lost", "engine_lost", "actor_lost", "deadline_exceeded", "overloaded", "draining"):
        assert repr(code) in traces, code
