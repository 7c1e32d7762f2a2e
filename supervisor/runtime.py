"""The runtime of a node: the resources of the machine for its children, passed to them as one value.

Time, randomness, threads and the environment come in only here, so that a test or a simulation can replace them, and a
run with the same seed takes the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from attrs import field, frozen

from actors.kit.offload import RunInThread
from actors.kit.spans import Spans
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
    chance: Callable[[int], RandomSource]  # makes a random source from a seed
    new_nonce: Callable[[], bytes]
    new_number: Callable[[], int]  # draws 63 bits, unique in the cluster
    reserve: DescriptorReserve = field(factory=DescriptorReserve)
    spans: Spans = field(factory=Spans)
