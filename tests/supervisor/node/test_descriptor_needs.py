"""A node that may need more file descriptors than its process may have does not start."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import StartFailed
from supervisor.config.schema import Cluster
from supervisor.engines.kinds import read_cluster
from supervisor.launcher import preflight
from supervisor.node import descriptor_needs, preview
from tests.rig.cluster_files import MODEL, engine

ONE = f"""
[gateway]
port = 0
[gateway.limits]
connections_max = 1000
{MODEL}{engine("a")}"""


@pytest.fixture
def cluster(written: Callable[[str], Path]) -> Cluster:
    return read_cluster(written(ONE))


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Any], None]:
    """Return a function that sets the soft and the hard limit of this process."""
    limits = [0, 0]

    def limit(soft: int, hard: int) -> None:
        limits[:] = soft, hard

    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limit(*new))
    limit.now = limits  # type: ignore[attr-defined]
    return limit


def test_a_node_that_may_need_more_descriptors_than_it_may_have_is_refused(
    cluster: Cluster, limited: Callable[[int, int], None]
) -> None:
    limited(1024, 1024)
    sentence = (
        r"^node main may need 1,224 file descriptors, and its process may have 1,024: 1,000 for connections \+ 16 for"
        r" engines \+ 128 for listeners \+ 64 for the process \+ 16 for the reserve; raise the limit \(ulimit -n\), or"
        r" lower gateway\.limits\.connections_max$"
    )
    with pytest.raises(StartFailed, match=sentence):
        preview.describe_node(cluster, "main", {})
    with pytest.raises(StartFailed, match=sentence):
        preflight.check_can_start(cluster, "main")
    limited(1224, 1224)
    assert "file descriptors: 1,224 at most: 1,000 for connections + " in preview.describe_node(cluster, "main", {})
    limited(resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    preflight.check_can_start(cluster, "main")


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 524_288, 524_288),
        (1024, 1_073_741_816, 1_048_576),
        (1024, resource.RLIM_INFINITY, 1_048_576),
        (2_000_000, 4_000_000, 2_000_000),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    ],
)
def test_the_limit_is_raised_as_far_as_permitted(limited: Any, soft: int, hard: int, raised: int) -> None:
    limited(soft, hard)
    descriptor_needs.raise_limit()
    assert limited.now == [raised, hard]
