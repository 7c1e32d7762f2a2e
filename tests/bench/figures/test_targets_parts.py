"""The parts of `make bench` and `make bench-full`, which make the results that are kept."""

from __future__ import annotations

import argparse
import re
import shlex
from importlib import import_module

import pytest

from bench.__main__ import COMMANDS
from bench.figures.targets import TARGETS
from bench.rig.node import ROOT

PARTS = dict(re.findall(r"^\$\(call part, ([^,]+), (.+)\)$", (ROOT / "Makefile").read_text(), re.MULTILINE))

ELSEWHERE = "added-latency"  # it asks an engine's host, which a bench may not import


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_a_command_that_is_accepted(name: str) -> None:
    command, *words = shlex.split(PARTS[name])
    parser = argparse.ArgumentParser()
    import_module(COMMANDS[command][0]).add(parser)
    parser.parse_args([*words, "--json", f"build/bench/{name}.json"])


def test_each_part_is_run_by_one_of_both() -> None:
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    listed = [
        name for names in re.findall(r"^(?:TEN_MINUTES|AN_HOUR) := (.+)$", text, re.MULTILINE) for name in names.split()
    ]
    assert sorted(listed) == sorted([*PARTS, ELSEWHERE])


def test_each_target_has_a_part_that_measures_it() -> None:
    assert {target.result for target in TARGETS} - {ELSEWHERE} <= PARTS.keys()
