"""TensorRT-LLM's kind in a real host process, whose package is the recorded fake."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio
from attrs import evolve

from actors.engines import leftover_memory
from actors.engines.encoding.port import Encoder
from actors.engines.port import Engine
from actors.engines.trtllm.spec import TrtllmSpec
from bench.rig.node import MODEL, ROOT, short_folder
from protocol.messages.cluster import Leg
from supervisor.engines.host.life import HostRuntime
from supervisor.engines.trtllm.engine import run_encoder, run_engine
from supervisor.processes import run_folder
from supervisor.processes.output_log import OutputLog
from supervisor.processes.process import GracePeriods, Ladder
from supervisor.supervision.registration import Registration

PublishedT = TypeVar("PublishedT", Engine, Encoder)
FAKE = ROOT / "tests" / "rig" / "fake_tensorrt_llm"
STARTED_WITHIN_S = 60.0
SMALL_IMAGES = {"min_pixels": 28 * 28}  # the contracts have images that the tiny model would enlarge
SPEC = TrtllmSpec("e", "", slots=8, kv_tokens_max=8192, page_size=16)


def one_end_model(folder: Path) -> Path:
    """Return a copy of the tiny model with one end token: TensorRT-LLM holds back no more before a least length."""
    copy = folder / "model"
    shutil.copytree(ROOT / "examples" / MODEL, copy, ignore=shutil.ignore_patterns("generation_config.json"))
    return copy


def image_model(folder: Path, family: str) -> Path:
    """Return a copy of the tiny model with a vision tower, as one of a family; the fake reads no weights."""
    copy = folder / family
    left_out = shutil.ignore_patterns("generation_config.json", "*.safetensors")
    shutil.copytree(ROOT / "examples" / "tiny-vision", copy, ignore=left_out)
    for name, changes in (("config.json", {"model_type": family}), ("preprocessor_config.json", SMALL_IMAGES)):
        (copy / name).write_text(json.dumps({**json.loads((copy / name).read_text()), **changes}))
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

    Without a model it is that of `one_end_model`. With the `engines` of an earlier body, it is the next life of that
    engine.
    """
    async with _hosted(run_engine, spec, engines or Registration[Engine](), silent_s, environment) as published:
        yield published


@asynccontextmanager
async def trtllm_encoder(spec: TrtllmSpec, **environment: str) -> AsyncIterator[Registration[Encoder]]:
    """Run an encoder for the body in the same way."""
    encoders = Registration[Encoder]()
    async with _hosted(run_encoder, evolve(spec, leg=Leg.ENCODE), encoders, 10.0, environment) as published:
        yield published


@asynccontextmanager
async def _hosted(
    run: Callable[..., Awaitable[None]],
    spec: TrtllmSpec,
    engines: Registration[PublishedT],
    silent_s: float,
    environment: Mapping[str, str],
) -> AsyncIterator[Registration[PublishedT]]:
    with short_folder() as base, run_folder.run_folder(base, leftover_memory.remove) as folder:

        def output_log(name: str) -> OutputLog:
            return OutputLog(Path(base) / f"{name}.log")

        runtime = HostRuntime(folder, output_log, GracePeriods(), Ladder(), time.time, silent_s)
        model = spec.model_path or str(one_end_model(Path(base)))
        own = evolve(spec, model_path=model, environment={**spec.environment, **environment})
        variables = {**os.environ, "PYTHONPATH": str(FAKE)}
        async with trio.open_nursery() as nursery:
            with trio.fail_after(STARTED_WITHIN_S):
                await nursery.start(partial(run, own, None, variables, engines, runtime))
            yield engines
            nursery.cancel_scope.cancel(reason="the test has ended")
