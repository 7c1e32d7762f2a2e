"""NVIDIA Dynamo 1.6.1: its front end and its mocker, an engine without a model, at a step of about 6 ms."""

from __future__ import annotations

from bench.peers.dynamo import PLANES, front_end, variables
from bench.peers.mock_model import mock_model
from bench.peers.peer import MODEL, PAGE_SIZE, Command, Peer, Setup

ENVIRONMENT = "dynamo-mocker"
KV_TOKENS_MAX = 1_000_000
STEP_S = 0.006  # of the mocker at a speed-up of 1


def commands(setup: Setup) -> list[Command]:
    """Return the commands of the front end and of one process with all mocked workers."""
    model = ("--model-path", str(mock_model(setup.folder / "model")), "--model-name", MODEL)
    values = {
        "engine-type": "sglang",
        "block-size": PAGE_SIZE,
        "num-gpu-blocks-override": KV_TOKENS_MAX // PAGE_SIZE,
        "max-num-seqs": setup.slots,
        "speedup-ratio": STEP_S / setup.step_s,
        "num-workers": setup.workers,
    }
    words = (word for name, value in values.items() for word in (f"--{name}", str(value)))
    mocker = (setup.python(ENVIRONMENT), "-m", "dynamo.mocker", *model, *words, *PLANES)
    return [front_end(setup, ENVIRONMENT), Command("mocker", mocker, variables(setup))]


PEER = Peer(
    name="dynamo-mocker",
    title="Dynamo 1.6.1, front end and mocker",
    engine="simulated",
    environments=(ENVIRONMENT,),
    commands=commands,
    workers_max=16,
)
