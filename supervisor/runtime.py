"""What a node may touch of the world."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from attrs import field, frozen

from actors.engines.simulated.faults import Chance
from actors.engines.simulated.rendezvous_rooms import Meetings
from actors.kit.offload import Aside
from supervisor.processes.process import Hurry
from supervisor.processes.run_folder import Folder
from supervisor.sockets.descriptor_reserve import Reserve
from supervisor.telemetry.metrics import Metrics


@frozen
class World:
    """A node's folder, its environment, clock, chance, threads."""

    folder: Folder
    logs: Path
    environment: Mapping[str, str]
    new_id: Callable[[], str]
    now: Callable[[], float]
    strftime: Callable[[str], str]
    aside: Aside
    hurry: Hurry
    metrics: Metrics
    chance: Callable[[int], Chance]  # from a seed
    new_nonce: Callable[[], bytes]
    new_room: Callable[[], int]
    reserve: Reserve = field(factory=Reserve)
    meetings: Meetings = field(factory=Meetings)
