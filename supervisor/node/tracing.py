"""The traces of a node as `[tracing]` has them: the export of its spans, and the packages for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec

from actors.kit.spans import Spans
from supervisor.config.load import Misconfigured
from supervisor.config.schema import Cluster
from supervisor.telemetry.registry import Registry
from supervisor.version import version

OWN = "opentelemetry.proto"
OF_ENGINES = (
    "opentelemetry.sdk",
    "opentelemetry.exporter.otlp.proto.grpc",  # SGLang imports both exporters, whichever it uses
    "opentelemetry.exporter.otlp.proto.http",
)
HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
"""The variable with further headers of a request to the collector, such as a key: `name=value,name=value`."""


def check_packages(cluster: Cluster) -> None:
    """Raise `Misconfigured` if a package is missing that `[tracing]` needs."""
    section = cluster.tracing
    if section.endpoint is None:
        return
    needed = (OWN, *(OF_ENGINES if section.engines else ()))
    if missing := [name for name in needed if not _is_installed(name)]:
        raise Misconfigured(
            "tracing.engines" if OWN not in missing else "tracing.endpoint",
            f"traces need packages that are not installed ({', '.join(missing)}): pip install 'espalier[tracing]'",
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
    """Return what records the spans of a node, and define its metrics; raises `Misconfigured` without a package."""
    section = cluster.tracing
    if section.url is None:
        return Spans()
    check_packages(cluster)
    # Without `[tracing]` the packages may be missing.
    from supervisor.telemetry import spans  # noqa: PLC0415

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
