"""The cluster of the parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bench.rig.cluster import Cluster, cluster
from bench.rig.vision_cluster import simulated_plan
from bench.rig.vision_model import FACTOR, write_vision_model

PIXELS_MAX = 1280 * FACTOR**2  # of a picture as the model sees it: the default of its family
WIDTH = 1536  # elements of an embedding, as in a model of 2B parameters
STEP_S = 0.05  # 20 tokens a second for each stream
ENCODING_COSTS = {"fixed_s": 0.002, "per_item_s": 0.005}


@contextmanager
def running(
    folder: Path, *, gateway: str = "", encoder: Mapping[str, object] | None = None, step_s: float = STEP_S
) -> Iterator[Cluster]:
    """Run a cluster of simulated engines; `gateway` and `encoder` are keys of these tables."""
    folder.mkdir()
    plan = simulated_plan(
        write_vision_model(folder / "model", pixels_max=PIXELS_MAX),
        slots=128,
        encoder=encoder,
        encoding_costs=ENCODING_COSTS,
        costs={"fixed_s": step_s, "per_prefill_token_s": 0.0, "per_running_s": 0.0},
        width=WIDTH,
        gateway=gateway,
    )
    with cluster(folder, plan) as target:
        yield target
