"""The runtime of a node: all that its children take from the machine, passed to them as one value.

Time, randomness, threads and the environment come in here and nowhere else, so that a test or a simulation can replace
them, and a run with the same seed takes the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from attrs import field, frozen

from actors.kit.offload import RunInThread
from supervisor.processes.process import GracePeriods
from supervisor.processes.run_folder import RunFolder
from supervisor.sockets.descriptor_reserve import DescriptorReserve
from supervisor.supervision.supervise import RandomSource
from supervisor.telemetry.metrics import Metrics


@frozen
class Runtime:
    """A node's folder, environment, clock, random sources and threads."""

    folder: RunFolder
    logs: Path
    environment: Mapping[str, str]
    new_id: Callable[[], str]
    now: Callable[[], float]
    strftime: Callable[[str], str]
    run_in_thread: RunInThread
    grace: GracePeriods
    metrics: Metrics
    chance: Callable[[int], RandomSource]  # from a seed
    new_nonce: Callable[[], bytes]
    new_number: Callable[[], int]  # of 63 bits, which no other call of any node of the cluster returns
    reserve: DescriptorReserve = field(factory=DescriptorReserve)
