"""The KV events of a step are published before it begins."""

from __future__ import annotations

from attrs import define, field

from actors.engines.sglang.host.step_events import publishing


@define(eq=False)
class FakeScheduler:
    """A scheduler that is its own publisher, and a log of what it does."""

    log: list[str] = field(factory=list)

    @property
    def kv_events_publisher(self) -> FakeScheduler:
        return self

    def publish_kv_events(self) -> None:
        self.log.append("publish")

    def plan(self, batch: str, *, chunk: int) -> str:
        self.log.append(f"evict for {batch}, {chunk}")
        return batch


def test_what_is_evicted_for_a_step_is_told_when_the_step_is_planned_and_not_before() -> None:
    scheduler = FakeScheduler()
    assert publishing(FakeScheduler.plan)(scheduler, "a batch", chunk=256) == "a batch"
    assert scheduler.log == ["evict for a batch, 256", "publish"]
