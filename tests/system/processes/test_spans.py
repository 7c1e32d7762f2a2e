"""Spans of one request from a gateway's process, from a worker's, and from SGLang's scheduler, in one trace."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.rig.node import ROOT, SGLANG, free_ports, short_folder, wait_until
from tests.rig.collector import Collector, collecting
from tests.rig.launched import check_exit, running_launcher, wait_ready

WITHIN_S = 30.0
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODY = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "an oak"}]}
SIMULATED = 'kind = "simulated"\nkv_tokens_max = 4096\n'
CLUSTER = """\
[node.front]
[node.one]
listen = "127.0.0.1:{ports[1]}"
[cluster]
silent_s = 8.0
[gateway]
node = "front"
port = {ports[0]}
[tracing]
endpoint = "{url}"
engines = {engines}
[model.tiny]
path = "{tiny}"
policy = "kv"
[engine.tiny-1]
node = "one"
model = "tiny"
"""
SPANS = [
    "chat tiny (front)",
    "  queue (front)",
    "  prepare (front)",
    "  route (front)",
    "  generate (front)",
    "    compute (one)",
]


def asked(port: int, **headers: str) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(BODY).encode(),
        {"content-type": "application/json", **headers},
    )
    with urllib.request.urlopen(request, timeout=WITHIN_S) as response:
        assert response.status == 200


def of_engine(collector: Collector, trace: str) -> list[str]:
    """Return the names of SGLang's spans in a trace."""
    return [span.name for span in collector.of(trace) if span.process == "engine"]


@contextmanager
def traced(collector: Collector, engine: str, *, engines: bool) -> Iterator[int]:
    """Run a gateway and a worker until the end of the body, and yield the gateway's port."""
    ports = free_ports(2)
    text = CLUSTER.format(ports=ports, url=collector.url, engines=str(engines).lower(), tiny=ROOT / "examples" / "tiny")
    with short_folder() as folder, running_launcher(folder, text + engine, ports[0]) as target:
        wait_ready(target)
        yield ports[0]
        target.process.terminate()
        check_exit(target)


@pytest.mark.realtime
def test_a_gateway_and_a_worker_export_the_spans_of_one_trace_and_the_last_ones_at_their_end() -> None:
    with collecting("::1") as collector:
        with traced(collector, SIMULATED, engines=False) as port:
            asked(port, traceparent=f"00-{TRACE[::-1]}-{CALLER}-00")
            asked(port, traceparent=f"00-{TRACE}-{CALLER}-01")
            asked(port)
        assert collector.tree(TRACE, CALLER) == SPANS
        (own,) = {span.trace for span in collector.spans} - {TRACE}
        assert collector.tree(own, "") == SPANS


@pytest.mark.engine
@pytest.mark.nightly
def test_an_engine_exports_its_spans_below_its_workers_and_none_of_an_unsampled_trace() -> None:
    with collecting() as collector:
        with traced(collector, SGLANG, engines=True) as port:
            asked(port, traceparent=f"00-{TRACE[::-1]}-{CALLER}-00")
            asked(port, traceparent=f"00-{TRACE}-{CALLER}-01")
            assert wait_until(lambda: "decode_forward" in of_engine(collector, TRACE), WITHIN_S) is not None
        assert {span.trace for span in collector.spans} == {TRACE}, "a node asks its engine for itself, in no trace"
        assert collector.tree(TRACE, CALLER)[: len(SPANS)] == SPANS
        spans = {span.name: span for span in collector.of(TRACE)}
        assert spans["route"].attributes["espalier.route.decode.workers"] == ["one/tiny-1"]
        assert spans["route"].attributes["espalier.route.decode.costs"][0] > 0
        (engine,) = [span for span in collector.of(TRACE) if span.parent == spans["compute"].span]
        assert engine.attributes["rid"] == spans["compute"].attributes["espalier.request.id"]
        assert {"tokenize", "prefill_forward", "decode_forward"} <= {*of_engine(collector, TRACE)}
        assert "decode_loop" not in spans, "there is no span for a token"
