"""The example dashboard loads, and names only metrics and labels that a cluster tells."""

from __future__ import annotations

import json
import re
import string
from pathlib import Path

import pytest
import trio
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from actors.routing.outliers import Ejection, Suspect
from protocol.messages.engine import EngineLoad
from protocol.messages.generation import Usage
from supervisor.engines.kinds import read_cluster
from supervisor.observers import RoutingMetrics
from supervisor.telemetry.loop_monitor import LoopMonitor
from supervisor.telemetry.metrics import Metrics
from supervisor.telemetry.spans import SpanExport
from supervisor.threads.queued_writer import QueuedWriter
from tests.rig.assembly import built_assembly
from tests.rig.links import idle_link
from tests.rig.pools import one_cell, pool

ROOT = Path(__file__).parents[2]
BOARD = json.loads((ROOT / "examples" / "grafana" / "espalier.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
OF_PROMETHEUS = {"instance", "job"}

FILE = f"""
[node.front]
[node.back]
listen = "127.0.0.1:1"
[gateway]
node = "front"
[model.tiny]
path = "{ROOT / "examples" / "tiny"}"
policy = "kv"
[engine.tiny-0]
node = "back"
model = "tiny"
kind = "simulated"
kv_tokens_max = 4096
simulated.media = {{ image_token = 5 }}
{pool("quick", "tiny-0")}{one_cell("quick")}[engine.eyes]
node = "back"
model = "tiny"
kind = "simulated"
leg = "encode"
simulated.media = {{ image_token = 5 }}
"""


def happened(metrics: Metrics) -> None:
    """Let everything happen once that is told only from then on."""
    metrics.first_token("tiny", 1.0)
    metrics.token_gaps("tiny").observe(1.0)
    metrics.request_ended("tiny", "chat", "stop", 1.0, Usage(3, 2))
    metrics.request_ended("tiny", "chat", "left", 1.0, Usage(3, 2))
    metrics.child_restarted("back/tiny-0")
    metrics.refused("overloaded")
    metrics.client_dropped("stalled")
    metrics.response_incomplete("chat", "drain")
    metrics.aborted("tiny-0", 0.01)
    metrics.set_stuck_slots("tiny-0", 1)
    metrics.canary_ended("back/tiny-0", "0", "answered")
    metrics.canary_answered("back/tiny-0", "0", 0.01)
    metrics.grammar_checked("tiny", "refused", 0.2)
    metrics.encoding_ended("back/eyes", "image", "cached")
    metrics.embedding_ended("back/nearby", "ended", 1.0, 1, 1)
    metrics.encoding_waited("back/eyes", 0.01)
    metrics.batch_encoded("back/eyes", "ended", 0.1)
    metrics.item_encoded("back/eyes", "image", 64)
    metrics.set_encoder_queue("back/eyes", 1, 2)
    metrics.media_prepared("tiny", "prepared", 0.2)
    metrics.route_chosen("tiny", 1e-4)
    metrics.overlap_found("tiny", 64, 64, blind=False)
    RoutingMetrics(metrics, "tiny").call_ended("back/tiny-0", "ended")
    RoutingMetrics(metrics, "tiny").call_resumed("engine_lost", 0)
    metrics.pools.called("quick", "ended")
    metrics.pools.diverted("quick", "")
    metrics.logs["tiny-0"] = QueuedWriter(lambda _: None)
    turns = LoopMonitor()
    turns.count("links.Links.run", 1.0)
    turns.add_metrics(metrics.registry)
    SpanExport(QueuedWriter(lambda _: None), str, float).add_metrics(metrics.registry)
    RoutingMetrics(metrics, "tiny").worker_ejected("back/tiny-0", "internal")


@pytest.fixture
async def exported(tmp_path: Path) -> dict[str, set[str]]:
    """The labels of every series that one of two nodes tells, by its name."""
    file = tmp_path / "cluster.toml"
    file.write_text(FILE)
    cluster, families = read_cluster(file), list[Metric]()
    for node in cluster.node:
        assembly, metrics = built_assembly(cluster, node)
        happened(metrics)
        for model in assembly.models.values():
            suspect = Suspect("back/tiny-0", "both", 2)
            model.routing.outliers.failed(suspect, "internal", Ejection(failures_max=1), trio.current_time())
        assert assembly.links is not None
        for other in cluster.node.keys() - {node}:
            assembly.links.traffic[other].sent(1)
            assembly.directory.linked(other, idle_link())
        loads = {name: EngineLoad(0, 0, 0) for name in assembly.directory.local}
        text = metrics.render(loads, dict.fromkeys(loads, 1)).decode()
        families += text_string_to_metric_families(text)
    named: dict[str, set[str]] = {}
    for family in families:
        of_family = {label for sample in family.samples for label in sample.labels}
        for suffix in SUFFIXES[family.type]:
            named.setdefault(family.name + suffix, set()).update(of_family)
    return named


def names_in(expr: str) -> set[str]:
    """Return the names of series in an expression: words that are no function, no label and no keyword."""
    bare = re.sub(r'"[^"]*"', "", expr)
    bare = re.sub(r"\b(by|without|on|ignoring)\s*\([^)]*\)", "", bare)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", bare)
    return set(re.findall(r"\b[a-zA-Z_:][a-zA-Z0-9_:]*\b(?!\s*\()", bare)) - {"and", "or", "unless", "sum", "min"}


def labels_in(expr: str, legend: str) -> set[str]:
    grouped = {name for group in re.findall(r"\bby\s*\(([^)]*)\)", expr) for name in re.split(r"[\s,]+", group) if name}
    matched = {name for braces in re.findall(r"\{([^}]*)\}", expr) for name in re.findall(r"(\w+)\s*(?:=|!)", braces)}
    return grouped | matched | set(re.findall(r"\{\{(\w+)\}\}", legend))


def test_the_names_in_an_expression_are_found() -> None:
    expr = 'histogram_quantile(0.9, sum by (le, of) (rate(a_bucket{b="c"}[$__rate_interval]))) / min(d) + e:f'
    assert names_in(expr) == {"a_bucket", "d", "e:f"}
    assert labels_in(expr, "{{of}} {{g}}") == {"le", "of", "b", "g"}


def test_the_dashboard_is_one_that_grafana_loads() -> None:
    assert BOARD["title"]
    assert BOARD["uid"]
    assert BOARD["schemaVersion"] >= 36
    (variable,) = BOARD["templating"]["list"]
    assert (variable["type"], variable["query"], variable["name"]) == ("datasource", "prometheus", "datasource")
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in PANELS:
        assert panel["title"]
        assert panel["type"] == "timeseries"
        assert panel["targets"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        assert set(refs) <= set(string.ascii_uppercase)
        assert all(target["expr"] and target["datasource"] == panel["datasource"] for target in panel["targets"])


def test_no_two_panels_lie_on_each_other() -> None:
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in BOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


async def test_every_series_on_the_dashboard_is_exported_with_these_labels(exported: dict[str, set[str]]) -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            names = names_in(target["expr"])
            assert names, panel["title"]
            assert names <= exported.keys(), (panel["title"], names - exported.keys())
            labels = {"le", *OF_PROMETHEUS}.union(*(exported[name] for name in names))
            asked = labels_in(target["expr"], target["legendFormat"])
            assert asked <= labels, (panel["title"], asked - labels)


async def test_every_exported_metric_is_on_the_dashboard(exported: dict[str, set[str]]) -> None:
    shown = {name for panel in PANELS for target in panel["targets"] for name in names_in(target["expr"])}
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in exported}
    assert families == {re.sub("_(bucket|sum|count)$", "", name) for name in shown}


def test_an_engine_that_two_nodes_export_is_shown_once() -> None:
    engines = re.compile("espalier_engine_(up|running|waiting|kv_tokens_used)")
    shown = [target["expr"] for panel in PANELS for target in panel["targets"] if engines.search(target["expr"])]
    assert len(shown) == 4
    assert all(re.match(r"(max|min) by \((engine|of)\) ", expr) for expr in shown), shown
