"""A host of TensorRT-LLM on a machine without the package: its start fails at once, and says where the package is."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import trio

from actors.engines import leftover_memory
from actors.engines.port import Engine
from actors.engines.trtllm.spec import TrtllmSpec
from bench.rig.node import MODEL, ROOT, short_folder
from protocol.errors import StartFailed
from supervisor.engines.host.life import HostRuntime
from supervisor.engines.trtllm.engine import host_environment, run_engine
from supervisor.processes import run_folder
from supervisor.processes.output_log import OutputLog
from supervisor.processes.process import GracePeriods, Ladder
from supervisor.supervision.registration import Registration

SPEC = TrtllmSpec("e", str(ROOT / "examples" / MODEL), slots=8, kv_tokens_max=4096)


@pytest.mark.realtime
async def test_without_the_package_a_start_fails_within_seconds_with_the_place_of_the_package() -> None:
    """It takes 0.4 s on an idle machine; the limit here is for a busy one."""
    with short_folder() as base, run_folder.run_folder(base, leftover_memory.remove) as folder:

        def output_log(name: str) -> OutputLog:
            return OutputLog(Path(base) / f"{name}.log")

        runtime = HostRuntime(folder, output_log, GracePeriods(), Ladder(), time.time)
        engines: Registration[Engine] = Registration()
        with trio.fail_after(10), pytest.raises(StartFailed) as caught:
            await run_engine(SPEC, None, {**os.environ, "PYTHONPATH": ""}, engines, runtime)
    assert "TensorRT-LLM is not installed for" in str(caught.value)
    assert "https://pypi.nvidia.com tensorrt-llm==1.3.0rc29" in str(caught.value)
    assert "CPython 3.10 and 3.12 with CUDA" in str(caught.value)


def test_a_host_has_the_modules_of_this_package_and_the_engines_own_variables() -> None:
    environment = host_environment({"PYTHONPATH": "/more", "A": "1"}, {"A": "2"}, Path("/run/e"))
    assert environment == {"PYTHONPATH": f"{ROOT}{os.pathsep}/more", "A": "2", "TMPDIR": "/run/e"}
