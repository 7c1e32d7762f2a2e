"""The simulator: the whole system in one process, in virtual time, from one seed; `docs/testing.md` explains it."""

from tests.rig.network import SimTransport, sim_pair
from tests.rig.scheduler import DEADLOCKED_S, Steps, counting, simulate, tasks

__all__ = ["DEADLOCKED_S", "SimTransport", "Steps", "counting", "sim_pair", "simulate", "tasks"]
