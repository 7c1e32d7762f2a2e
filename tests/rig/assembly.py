"""An assembled node and its metrics; nothing of it runs."""

from __future__ import annotations

from functools import partial
from itertools import count
from pathlib import Path
from random import Random

from actors.kit.offload import run_inline
from supervisor.config.schema import Cluster
from supervisor.gateway.keys.keys import Keys
from supervisor.node.assembly import Assembly, assemble
from supervisor.node.credentials import Credentials
from supervisor.processes.process import GracePeriods
from supervisor.processes.run_folder import RunFolder
from supervisor.runtime import Runtime
from supervisor.telemetry.metrics import Metrics


def everybody() -> Credentials:
    """Return credentials that let everybody connect."""
    return Credentials(secret=b"", tls=None, keys=Keys(), watchers=Keys(), certificate=None, client_tls=None)


def built_assembly(cluster: Cluster, node: str, credentials: Credentials | None = None) -> tuple[Assembly, Metrics]:
    """Return an assembled node and its metrics; everybody may connect unless `credentials` are given."""
    runtime = built_runtime()
    return assemble(cluster, node, runtime, credentials or everybody()), runtime.metrics


def built_runtime() -> Runtime:
    """Return a runtime without threads and chance, whose folder is the working directory."""
    numbers = count(1)
    return Runtime(
        folder=RunFolder(Path(), -1),
        logs=Path(),
        environment={},
        new_id=lambda: f"{next(numbers):032x}",
        now=lambda: 1_700_000_000.0,
        strftime=lambda _: "",
        run_in_thread=run_inline,
        grace=GracePeriods(),
        metrics=Metrics(),
        chance=Random,
        new_nonce=lambda: bytes(32),
        new_number=partial(next, numbers),
    )
