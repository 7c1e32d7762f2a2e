"""A disk that is full under the folder of engines' logs costs the logs, and nothing else."""

from __future__ import annotations

import json

import pytest

from bench.rig.node import MODEL, node, short_folder, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

WITHIN_S = 120.0


def test_a_full_disk_under_the_engines_logs_is_reported_and_the_engine_serves() -> None:
    with short_folder() as folder:
        logs = folder / "logs"
        logs.mkdir()
        names = ("zygote", f"{MODEL}-0")
        for name in names:
            (logs / f"{name}.log").symlink_to("/dev/full")
        with node(folder) as target:
            assert wait_until(lambda: target.metric("espalier_log_failing") == len(names), WITHIN_S) is not None, (
                target.output()
            )
            records = [json.loads(line) for line in target.output().splitlines() if "cannot be written" in line]
            assert sorted(record["file"] for record in records) == sorted(str(logs / f"{name}.log") for name in names)
            assert all("No space left" in record["reason"] for record in records)
            assert target.metric("espalier_engine_up") == 1
