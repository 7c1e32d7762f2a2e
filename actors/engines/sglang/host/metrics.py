"""SGLang's own metrics, as text in Prometheus's format.

Its scheduler and its tokenizer manager write them into files of the host's folder, which hold nothing of an earlier
life: the folder ends with the host. `prometheus_client` decides when it is imported whether it writes to files, so
nothing may import it before the environment of this host is set; the zygote, which forks many hosts, never may. Reading
and writing the text takes longer than a step of the engine, so it is done in a thread, once for all who ask meanwhile.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator

from actors.engines.sglang.spec import METRICS_PREFIX
from protocol.errors import NotReady
from protocol.messages.operations import METRICS_BYTES_MAX, EngineMetrics


class MetricsReader:
    """Reads the metrics of this host's engine; `read` returns them, in a thread."""

    def __init__(self, read: Callable[[], EngineMetrics]) -> None:
        self._read = read
        self._reading: asyncio.Task[EngineMetrics] | None = None

    async def metrics(self) -> EngineMetrics:
        """Return the metrics of now or of a read in flight; raises `NotReady` if they cannot be read."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.get_running_loop().create_task(asyncio.to_thread(self._read))
        try:
            return await asyncio.shield(self._reading)
        except Exception as error:  # a reader of metrics must not end an engine
            traceback.print_exception(error, file=sys.stderr)
            raise NotReady(f"its metrics cannot be read: {type(error).__name__}") from error


def read_files() -> EngineMetrics:
    """Return what the files of all processes of this host have, families in the order of their names."""
    from prometheus_client import multiprocess
    from prometheus_client.core import Metric
    from prometheus_client.exposition import generate_latest
    from prometheus_client.registry import Collector, CollectorRegistry

    class Family(Collector):
        def __init__(self, family: Metric) -> None:
            self.family = family

        def collect(self) -> Iterator[Metric]:
            yield self.family

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    families = [family for family in registry.collect() if family.name.startswith(METRICS_PREFIX)]
    families.sort(key=lambda family: family.name)
    return bounded(generate_latest(Family(family)).decode() for family in families)


def bounded(families: Iterable[str], bytes_max: int = METRICS_BYTES_MAX) -> EngineMetrics:
    """Return the texts of families one behind the other, without the families beyond `bytes_max`."""
    texts: list[str] = []
    size, left_out = 0, 0
    for text in families:
        if size + (length := len(text.encode())) > bytes_max:
            left_out += sum(not line.startswith("#") for line in text.splitlines())
            continue
        texts.append(text)
        size += length
    return EngineMetrics("".join(texts), left_out)
