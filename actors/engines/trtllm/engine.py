"""TensorRT-LLM behind the engine port."""

from __future__ import annotations

from typing import final

from attrs import define

from actors.engines.hosted_engine import HostedEngine


@final
@define(eq=False)
class TrtllmEngine(HostedEngine):
    """One TensorRT-LLM engine."""
