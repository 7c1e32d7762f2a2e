"""The kept results of routing: documents of the programs that measure it, as they were written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from attrs import frozen

ROUTING = "routing"  # the folder in that of all results
T = TypeVar("T")


@frozen
class ScaleRun:
    """One run of `tests/system/routing_scale.py`: the fields that it was given, and its figures."""

    run: dict[str, object]
    figures: dict[str, float]

    @property
    def workers(self) -> int:
        """The number of its workers."""
        return int(str(self.run["workers"]))


@frozen
class ClusterRun:
    """The figures of `tests/system/cluster_cost.py` for one number of workers."""

    workers: int
    figures: dict[str, float]


@frozen
class PolicyFigures:
    """The figures of one policy, one value a round; `equal` of the `predicted` requests were predicted rightly."""

    hit_share: Sequence[float]
    ttft_p50_ms: Sequence[float]
    ttft_p99_ms: Sequence[float]
    tokens_s: Sequence[float]
    equal: float = 0.0
    predicted: float = 0.0


@frozen
class PolicyRun:
    """One run of `bench/policies.py`: the figures of each policy, by load, on so many engines of a kind."""

    kind: str
    engines: int
    rounds: int
    loads: Mapping[str, Mapping[str, PolicyFigures]]


@frozen
class RoutingData:
    """The results of routing that are kept; a kind that is missing is empty."""

    scale: Sequence[ScaleRun] = ()
    cluster: Sequence[ClusterRun] = ()
    policies: Sequence[PolicyRun] = ()  # by number of engines


def read(folder: Path) -> RoutingData:
    """Read the results of a folder; raises `OSError`, or `msgspec.DecodeError` with the place of the mistake."""
    policies = [_read(path, PolicyRun) for path in folder.glob("policies-*.json")]
    return RoutingData(
        [run for path in folder.glob("scale.json") for run in _read(path, list[ScaleRun]) if "gateways" not in run.run],
        [run for path in folder.glob("cluster.json") for run in _read(path, list[ClusterRun])],
        sorted(policies, key=lambda run: run.engines),
    )


def _read(path: Path, form: type[T]) -> T:
    return msgspec.json.decode(path.read_bytes(), type=form)
