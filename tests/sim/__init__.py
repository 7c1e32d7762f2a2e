"""The simulator: the whole system in one process, in virtual time, from one seed; `docs/testing.md` explains it."""

from tests.sim.clock import DEADLOCKED_S, Steps, counting, simulate, tasks
from tests.sim.network import SimTransport, sim_pair

__all__ = ["DEADLOCKED_S", "SimTransport", "Steps", "counting", "sim_pair", "simulate", "tasks"]
