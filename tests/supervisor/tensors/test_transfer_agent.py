"""The agent of NIXL: what is missing, and what another node may say of its own, is an error with a reason."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
from importlib.util import find_spec

import pytest

from supervisor.tensors import transfer_agent
from supervisor.tensors.transfer_agent import NoTransfers, TransferAgent, TransferFailed, address_of, check_installed

needs_nixl = pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="nixl-cu12 is not installed")


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_agent, "MODULES", ("no_such_module",))
    with pytest.raises(NoTransfers, match='pip install "nixl-cu12>='):
        check_installed()
    with pytest.raises(NoTransfers, match="needs the package nixl-cu12"):
        TransferAgent("here")


@needs_nixl
@pytest.mark.realtime
def test_a_damaged_description_of_another_agent_is_refused_and_harms_nothing() -> None:
    rng, here, there, third = random.Random(1), *map(TransferAgent, ("here", "there", "third"))
    memory = mmap.mmap(-1, 2**16)
    for agent in (there, third):
        agent.register((address_of(memory), len(memory)))
    description = there.description
    for number in range(100):
        damaged = description[: rng.randrange(len(description))] if number % 2 else rng.randbytes(rng.randrange(1, 600))
        with pytest.raises(TransferFailed, match="cannot be loaded"):
            here.load(damaged)
    assert here.load(third.description) == "third"
    with pytest.raises(TransferFailed, match="cannot be read"):
        here.begin("third", [(2**20, 64)], [(2**20, 64)])
    here.unload("third")


@needs_nixl
@pytest.mark.realtime
def test_a_process_with_an_agent_ends_with_its_own_exit_code() -> None:
    program = "import sys; from supervisor.tensors.transfer_agent import TransferAgent as A; A('here'); sys.exit(7)"
    ended = subprocess.run([sys.executable, "-c", program], check=False, env=os.environ, capture_output=True)
    assert ended.returncode == 7
