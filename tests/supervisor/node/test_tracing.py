"""`[tracing]` of a node: its mistakes, the packages that it needs, and what a node exports."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from importlib.util import find_spec

import pytest

from actors.kit.spans import Spans
from protocol.errors import StartFailed
from protocol.strict.mistakes import Mistakes
from protocol.strict.structure import structure
from supervisor.config.schema import Cluster
from supervisor.config.sections import TracingSection
from supervisor.engines.kinds import read_cluster
from supervisor.node import tracing
from supervisor.node.reload import file_checks
from supervisor.telemetry.metrics import Metrics
from supervisor.telemetry.spans import SpanExport
from tests.supervisor.config.test_load import GOOD, Written


def traced(written: Written, *lines: str) -> Cluster:
    return read_cluster(written("\n".join([GOOD, "[tracing]", *lines, ""])))


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("http://[::1]:4318", "http://[::1]:4318/v1/traces"),
        ("http://[fe80::1]:4318/spans", "http://[fe80::1]:4318/spans"),
    ],
)
def test_a_collector_without_a_path_has_the_usual_one(endpoint: str, url: str) -> None:
    assert TracingSection(endpoint=endpoint).url == url


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "collector:4318",
        "grpc://collector",
        "http://",
        "http://a b",
        "http://a:99999",
        "http://key@a",
        "http://::1/",
    ],
)
def test_any_other_url_is_a_mistake(endpoint: str) -> None:
    with pytest.raises(Mistakes, match=r"endpoint: must be a URL like http://127.0.0.1:4318/v1/traces, got"):
        structure({"endpoint": endpoint}, TracingSection)


@pytest.mark.parametrize(
    ("key", "value"), [("ratio", 1.5), ("ratio", -0.1), ("spans_max", 0), ("engines", "no"), ("rate", 1)]
)
def test_values_out_of_bounds_are_mistakes(key: str, value: object) -> None:
    with pytest.raises(Mistakes, match=f"{key}: "):
        structure({"endpoint": "http://[::1]:4318", key: value}, TracingSection)


def test_a_mistake_is_one_of_its_line(written: Written) -> None:
    with pytest.raises(StartFailed, match=r"line 1[0-9]: tracing\.endpoint: must be a URL"):
        traced(written, 'endpoint = "localhost:4318"')


@pytest.mark.parametrize(
    ("missing", "engines", "path"),
    [
        ("opentelemetry.exporter.otlp.proto.grpc", "false", None),
        ("opentelemetry.exporter.otlp.proto.grpc", "true", "tracing.engines"),
    ],
)
def test_a_missing_package_is_a_mistake_with_the_way_to_install_it(
    written: Written, monkeypatch: pytest.MonkeyPatch, missing: str, engines: str, path: str | None
) -> None:
    def found(name: str) -> ModuleSpec | None:
        if name == missing:
            raise ModuleNotFoundError(name)
        return find_spec(name)

    cluster = traced(written, 'endpoint = "http://a"', f"engines = {engines}")
    monkeypatch.setattr(tracing, "find_spec", found)
    mistakes = [mistake for mistake in file_checks.mistakes(cluster, {}) if mistake.path.startswith("tracing")]
    assert [mistake.path for mistake in mistakes] == ([] if path is None else [path])
    assert all("pip install 'espalier[tracing]'" in str(mistake) for mistake in mistakes)
    assert all(missing in str(mistake) for mistake in mistakes)


def test_spans_of_engines_need_a_collector(written: Written) -> None:
    mistakes = [str(mistake) for mistake in file_checks.mistakes(traced(written, "engines = true"), {})]
    assert any("tracing.engines: means nothing without endpoint" in mistake for mistake in mistakes)


def test_a_node_without_the_section_exports_nothing(written: Written) -> None:
    metrics = Metrics()
    assert type(tracing.spans_of(read_cluster(written(GOOD)), "main", {}, str, float, metrics.registry)) is Spans
    assert "espalier_spans" not in metrics.render({}).decode()


def test_a_node_with_the_section_exports_with_its_limits(written: Written) -> None:
    metrics = Metrics()
    cluster = traced(written, 'endpoint = "http://a"', "ratio = 0.5", "spans_max = 7")
    spans = tracing.spans_of(cluster, "main", {tracing.HEADERS: "key=1"}, str, float, metrics.registry)
    assert isinstance(spans, SpanExport)
    assert (spans.ratio, spans.writer.items_max) == (0.5, 7)
    assert "espalier_spans_dropped_total 0.0" in metrics.render({}).decode()
