"""An engine in its node's own process, as the product's simulated engines are."""

from __future__ import annotations

from math import inf

from actors.engines.simulated.engine import SimulatedEngine
from tests.system.simulator.engines import SeeingEngine


class LocalEngine(SeeingEngine):
    """An engine in the place of a host: without a link between them, a fault of the link is a fault of the engine."""

    run = SimulatedEngine.run

    def cut(self) -> None:
        """Be lost at once, as the engine at the other end of a line is that is cut."""
        self.crash()

    def swallow(self) -> None:
        """Send nothing more, and release nothing."""
        self.stall(inf)

    def check_free(self) -> None:
        """Check that nothing is held for any request, no page of memory either."""
        assert not self.scheduler.running, "an engine slot is held"
        assert not self.scheduler.waiting
        self.check_whole()
        assert not self._answers, "the engine remembers a request"
