"""The traces of a node as `[tracing]` has them: the export of its spans, and the packages for those of its engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec

from actors.kit.spans import Spans
from supervisor.config.load import Misconfigured
from supervisor.config.schema import Cluster
from supervisor.telemetry import spans
from supervisor.telemetry.registry import Registry
from supervisor.version import version

OF_ENGINES = (
    "opentelemetry.sdk",
    "opentelemetry.exporter.otlp.proto.grpc",  # SGLang imports both exporters, whichever it uses
    "opentelemetry.exporter.otlp.proto.http",
)
HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
"""The variable with further headers of a request to the collector, such as a key: `name=value,name=value`."""


def check_packages(cluster: Cluster) -> None:
    """Raise `Misconfigured` if a package is missing by which SGLang exports spans."""
    section = cluster.tracing
    if section.endpoint is None:
        if section.engines:
            raise Misconfigured("tracing.engines", "means nothing without endpoint, to which SGLang exports its spans")
        return
    if section.engines and (missing := [name for name in OF_ENGINES if not _is_installed(name)]):
        names = ", ".join(missing)
        raise Misconfigured(
            "tracing.engines",
            f"SGLang exports spans by packages that are not installed ({names}): pip install 'espalier[tracing]'",
        )


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # nor is the package that it is in
        return False


def spans_of(
    cluster: Cluster,
    node: str,
    environment: Mapping[str, str],
    new_id: Callable[[], str],
    now: Callable[[], float],
    registry: Registry,
) -> Spans:
    """Return what records the spans of a node, and define its metrics."""
    section = cluster.tracing
    if section.url is None:
        return Spans()
    resource = {
        "service.name": "espalier",
        "service.namespace": cluster.cluster.name,
        "service.version": version(),
        "service.instance.id": f"{node}/{new_id()}",
    }
    export = spans.SpanExport(
        spans.export(section.url, resource, environment.get(HEADERS, ""), section.spans_max), new_id, now, section.ratio
    )
    export.add_metrics(registry)
    return export
