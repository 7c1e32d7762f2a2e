"""A pytest plugin that writes the outcome and the seconds of each test: `-p tests.run.recorder --record FOLDER`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="a folder for the outcomes of a run, as a JSON file")


def pytest_configure(config: pytest.Config) -> None:
    if (folder := config.getoption("--record")) is not None:
        os.environ.pop("PYTEST_ADDOPTS", None)  # a run of pytest that a test starts is no part of this one
        config.pluginmanager.register(Recorder(folder / f"{os.getpid()}.json"))


class Recorder:
    """The outcomes of one run of pytest, written when the run ends."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: dict[str, float] = {}
        self._kinds: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test has three reports: set-up, call and tear-down. One that failed decides; a skip is reported by set-up alone.
        name = report.nodeid
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration
        if report.failed or (report.outcome == "skipped" and self._kinds.get(name) != "failed"):
            self._kinds[name] = report.outcome
        self._kinds.setdefault(name, "passed")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._kinds[report.nodeid] = "failed"

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        tests = [[name, kind, self._seconds.get(name, 0.0)] for name, kind in self._kinds.items()]
        self._file.write_text(json.dumps({"status": int(exitstatus), "tests": tests}))
