"""NVIDIA Dynamo 1.6.1: its front end, and workers that it meets in a folder: no etcd, no NATS.

The workers have SGLang's engine; or they are its mocker, an engine without a model, at a step of about 6 ms.
"""

from __future__ import annotations

from pathlib import Path

from bench.peers import cpu_sglang
from bench.peers.mock_model import mock_model
from bench.peers.peer import MODEL, PAGE_SIZE, Command, Peer, Setup

PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")
MOCKER = "dynamo-mocker"  # its environment
KV_TOKENS_MAX = 1_000_000  # of the mocker
STEP_S = 0.006  # of the mocker at a speed-up of 1


def variables(setup: Setup) -> dict[str, str]:
    """Return what its processes find each other by, and a home of their own, where the front end keeps models."""
    home = setup.folder / "home"
    discovery = setup.folder / "discovery"
    for folder in (home, discovery):
        folder.mkdir(exist_ok=True)
    return {"DYN_FILE_KV": str(discovery), "DYN_LOG": "warn", "HOME": str(home)}


def front_end(setup: Setup, environment: str) -> Command:
    """Return the command of the front end."""
    where = ("--http-host", "127.0.0.1", "--http-port", str(setup.port))
    return Command("frontend", (setup.python(environment), "-m", "dynamo.frontend", *where, *PLANES), variables(setup))


def with_sglang(setup: Setup) -> list[Command]:
    """Return the commands of the front end and of its workers."""
    words = (setup.python("dynamo"), "-m", "dynamo.sglang", *cpu_sglang.flags(setup), *PLANES)
    added = {**cpu_sglang.VARIABLES, **variables(setup)}
    workers = [Command(f"worker-{number}", words, added) for number in range(setup.workers)]
    return [front_end(setup, "dynamo"), *workers]


def with_mocker(setup: Setup, folder: Path | None = None) -> list[Command]:
    """Return the commands of the front end and of one process with all mocked workers.

    The model is that of a `folder`, by default the tiny one with a vocabulary for the mocker.
    """
    path = mock_model(setup.folder / "model") if folder is None else folder
    model = ("--model-path", str(path), "--model-name", MODEL)
    values = {
        "engine-type": "sglang",
        "block-size": PAGE_SIZE,
        "num-gpu-blocks-override": max(KV_TOKENS_MAX, setup.kv_tokens_max) // PAGE_SIZE,
        "max-num-seqs": setup.slots,
        "speedup-ratio": STEP_S / setup.step_s,
        "num-workers": setup.workers,
    }
    words = (word for name, value in values.items() for word in (f"--{name}", str(value)))
    mocker = (setup.python(MOCKER), "-m", "dynamo.mocker", *model, *words, *PLANES)
    return [front_end(setup, MOCKER), Command("mocker", mocker, variables(setup))]


PEERS = (
    Peer(
        name="dynamo",
        title="Dynamo 1.6.1, front end and dynamo.sglang",
        engine="sglang",
        environments=("dynamo",),
        commands=with_sglang,
        workers_max=16,
    ),
    Peer(
        name="dynamo-mocker",
        title="Dynamo 1.6.1, front end and mocker",
        engine="simulated",
        environments=(MOCKER,),
        commands=with_mocker,
        workers_max=16,
    ),
)
