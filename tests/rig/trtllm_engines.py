"""TensorRT-LLM's kind in a real host process, whose package is the recorded fake."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import trio
from attrs import evolve

from actors.engines import leftover_memory
from actors.engines.port import Engine
from actors.engines.trtllm.spec import TrtllmSpec
from bench.rig.node import MODEL, ROOT, short_folder
from supervisor.engines.host.life import HostRuntime
from supervisor.engines.trtllm.engine import run_engine
from supervisor.processes import run_folder
from supervisor.processes.output_log import OutputLog
from supervisor.processes.process import GracePeriods, Ladder
from supervisor.supervision.registration import Registration

FAKE = ROOT / "tests" / "rig" / "fake_tensorrt_llm"
STARTED_WITHIN_S = 60.0
SPEC = TrtllmSpec("e", "", slots=8, kv_tokens_max=8192, page_size=16)


def one_end_model(folder: Path) -> Path:
    """Return a copy of the tiny model with one end token: TensorRT-LLM holds back no more before a least length."""
    copy = folder / "model"
    shutil.copytree(ROOT / "examples" / MODEL, copy, ignore=shutil.ignore_patterns("generation_config.json"))
    return copy


@asynccontextmanager
async def trtllm_engine(
    spec: TrtllmSpec = SPEC,
    engines: Registration[Engine] | None = None,
    *,
    silent_s: float = 10.0,
    **environment: str,
) -> AsyncIterator[Registration[Engine]]:
    """Run an engine for the body, without a node around it; its end raises in the body's nursery.

    With the `engines` of an earlier body, it is the next life of that engine.
    """
    with short_folder() as base, run_folder.run_folder(base, leftover_memory.remove) as folder:

        def output_log(name: str) -> OutputLog:
            return OutputLog(Path(base) / f"{name}.log")

        runtime = HostRuntime(folder, output_log, GracePeriods(), Ladder(), time.time, silent_s)
        engines = engines or Registration[Engine]()
        own = evolve(spec, model_path=str(one_end_model(Path(base))), environment={**spec.environment, **environment})
        variables = {**os.environ, "PYTHONPATH": str(FAKE)}
        async with trio.open_nursery() as nursery:
            with trio.fail_after(STARTED_WITHIN_S):
                await nursery.start(partial(run_engine, own, None, variables, engines, runtime))
            yield engines
            nursery.cancel_scope.cancel(reason="the test has ended")
