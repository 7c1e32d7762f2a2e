"""The outcomes of the parts of a run, and the lines that sum them up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from attrs import frozen

SLOWEST = 10
"""The number of tests that a run lists as its slowest."""
MINUTES_MAX = 15
"""The minutes that `make test` may take on two idle cores."""


@frozen
class Outcome:
    """The outcome of one test: `passed`, `failed` or `skipped`."""

    test: str
    kind: str
    seconds: float


@frozen
class Result:
    """The result of one part of a run: its exit status, which is that of pytest if it ran, its time and its tests."""

    part: str
    returncode: int
    seconds: float
    log: Path
    outcomes: Sequence[Outcome] = ()
    flaky: Sequence[str] = ()  # tests that failed beside others and passed alone

    @property
    def failed(self) -> Sequence[str]:
        """The tests that failed, also when they were run again."""
        return [each.test for each in self.outcomes if each.kind == "failed" and each.test not in self.flaky]

    @property
    def is_good(self) -> bool:
        """Whether the part passed: at once, or because each test that failed is a flaky one."""
        return self.returncode == 0 or (bool(self.flaky) and self.returncode == 1 and not self.failed)

    @property
    def line(self) -> str:
        """The result in one line."""
        counts = Counter(each.kind for each in self.outcomes)
        tests = "".join(f" {count:,} {kind}" for kind, count in sorted(counts.items()))
        word = "ok" if self.is_good else f"FAILED (exit status {self.returncode})"
        return f"{self.part:10} {self.seconds:6.0f} s  {word}{',' * bool(tests)}{tests}"


def read_record(folder: Path) -> tuple[int, list[Outcome]]:
    """Return the worst exit status and all outcomes that runs of pytest have written to a folder."""
    runs = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    return max((run["status"] for run in runs), default=0), [Outcome(*row) for run in runs for row in run["tests"]]


def summary(results: Sequence[Result], wall_s: float) -> Iterator[str]:
    """Yield the lines at the end of a run: slowest tests, flaky tests, failures, and the time of each part."""
    tests = [outcome for result in results for outcome in result.outcomes]
    if tests:
        yield f"The {SLOWEST} slowest tests:"
        for outcome in sorted(tests, key=lambda outcome: -outcome.seconds)[:SLOWEST]:
            yield f"  {outcome.seconds:6.1f} s  {outcome.test}"
    for result in results:
        yield from (f"flaky: {test} failed beside others and passed alone" for test in result.flaky)
    for result in results:
        yield from (f"FAILED: {test}" for test in result.failed)
        if not result.is_good:
            yield f"FAILED: {result.part}, see {result.log}"
    for result in results:
        yield result.line
    yield from over_time(tests, wall_s)
    counts = Counter(outcome.kind for outcome in tests)
    flaky = sum(len(result.flaky) for result in results)
    failed = counts["failed"] - flaky + sum(not result.is_good and not result.failed for result in results)
    # The plain form that readers of many test runners know.
    yield f"{counts['passed'] + flaky} passed, {failed} failed, {counts['skipped']} skipped"


def over_time(tests: Sequence[Outcome], wall_s: float) -> Iterator[str]:
    """Yield the minutes of a run and, where these are too many, the files to move to the nightly run."""
    yield f"{wall_s / 60:.1f} minutes of at most {MINUTES_MAX} on two idle cores"
    if wall_s > 60 * MINUTES_MAX:
        seconds: Counter[str] = Counter()
        for outcome in tests:
            seconds[outcome.test.partition("::")[0]] += outcome.seconds  # type: ignore[assignment]
        yield "If this machine is idle, mark tests of these files as `nightly`, the slowest first:"
        yield from (f"  {took_s:6.0f} s  {file}" for file, took_s in seconds.most_common(SLOWEST))
