"""Spans of one request from the gateway's process and from a worker's, in one trace at a collector."""

from __future__ import annotations

import json
import urllib.request

import pytest

from bench.rig.node import short_folder
from tests.rig.collector import collecting
from tests.rig.launched import check_exit, simulated_launcher, wait_ready

pytestmark = pytest.mark.realtime

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODY = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "an oak"}]}


def test_a_gateway_and_a_worker_export_the_spans_of_one_trace_and_their_last_ones_at_their_end() -> None:
    with short_folder() as folder, collecting("::1") as collector:
        tracing = f'[tracing]\nendpoint = "{collector.url}"\n[gateway]'
        with simulated_launcher(folder, change=("[gateway]", tracing)) as target:
            wait_ready(target)
            request = urllib.request.Request(
                f"http://127.0.0.1:{target.port}/v1/chat/completions",
                json.dumps(BODY).encode(),
                {"content-type": "application/json", "traceparent": f"00-{TRACE}-{CALLER}-01"},
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                assert response.status == 200
            target.process.terminate()
            check_exit(target)
        worker = next(span.process for span in collector.of(TRACE) if span.name == "compute")
        assert worker in {"one", "two"}
        assert collector.tree(TRACE, CALLER) == [
            "chat tiny (front)",
            "  queue (front)",
            "  prepare (front)",
            "  route (front)",
            "  generate (front)",
            f"    compute ({worker})",
        ]
