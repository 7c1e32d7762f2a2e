"""`[engine.NAME]` of a simulated engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from attrs import frozen

from actors.engines.simulated.costs import Costs
from actors.engines.simulated.faults import Faults
from protocol.strict.mistakes import Mistake
from supervisor.config.limits import Count
from supervisor.config.schema import Cluster, EngineSection


@frozen(kw_only=True)
class SimulatedKeys:
    """`[engine.NAME.simulated]`: how an engine without a model answers, and how long it takes."""

    waiting_max: Count = 256  # requests that wait inside it
    prefill_chunk: Count = 2048
    prefix_cache: bool = True
    length_min: Count = 16  # of an answer that ends by itself, in tokens
    length_max: Count = 512
    seed: int = 0
    costs: Costs = Costs()
    faults: Faults = Faults()


@frozen(kw_only=True)
class SimulatedSection(EngineSection):
    """`[engine.NAME]` with `kind = "simulated"`."""

    reads_text: ClassVar[bool] = True  # its answers are sentences, as tokens of the model

    kind: Literal["simulated"] = "simulated"
    simulated: SimulatedKeys = SimulatedKeys()

    @property
    def prefill_chunk_default(self) -> int:
        """The prompt tokens of one engine step where `prefill_chunk` is not given."""
        return self.simulated.prefill_chunk

    def mistakes(self, cluster: Cluster, path: str) -> Iterator[Mistake]:
        """Yield what is wrong in this section, which stands at `path`."""
        del cluster
        if self.simulated.length_min > self.simulated.length_max:
            yield Mistake(f"{path}.simulated.length_min", f"must be at most length_max ({self.simulated.length_max})")
