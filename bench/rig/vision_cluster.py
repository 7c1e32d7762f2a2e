"""Clusters that take pictures: a front that fetches and decodes them, an encoder, and engines that compute with them.

Only the front has a gateway, and so a media actor with its decoders; the other nodes have endpoints for metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench.rig.cluster import Plan, lines, node_engine_name, sglang, simulated
from bench.rig.node import ROOT
from bench.rig.vision_model import IMAGE_PAD, VIDEO_PAD, token_id

ENCODER, PREFILL, DECODE = "encoder", "prefill", "decode"
CONTEXT_MAX = 65_536
TINY_VISION = ROOT / "examples" / "tiny-vision"

SIMULATED_ENCODER = """\
kind = "simulated"
leg = "encode"
slots = {slots}
[engine.{name}.encoder]
{limits}
[engine.{name}.simulated.encoding_costs]
{costs}
"""
SGLANG_ENCODER = """\
device = "cpu"
leg = "encode"
slots = {slots}
[engine.{name}.encoder]
{limits}
"""
EACH_STEP = """\
[engine.{name}.settings]
load_snapshot_publish_interval = 1
"""
WIDTH = """\
[engine.{name}.simulated.media]
image_token = {image}
video_token = {video}
width = {width}
"""
MEDIA = """\
[gateway.media]
{media}
"""


def simulated_encoder(
    node: str,
    *,
    slots: int = 16,
    costs: Mapping[str, float] | None = None,
    limits: Mapping[str, object] | None = None,
) -> str:
    """Return the section of a simulated encoder on a node; `limits` are the keys of its table `encoder`."""
    return SIMULATED_ENCODER.format(
        name=node_engine_name(node), slots=slots, limits=lines(limits or {}), costs=lines(costs or {})
    )


def simulated_plan(
    model: Path,
    *,
    encoder_slots: int = 16,
    encoder: Mapping[str, object] | None = None,
    encoding_costs: Mapping[str, float] | None = None,
    costs: Mapping[str, float] | None = None,
    slots: int = 16,
    width: int = 64,
    media: Mapping[str, object] | None = None,
    gateway: str = "",
) -> Plan:
    """Return the plan of a front, an encoder, a prefill and a decode.

    `encoder` and `media` are the keys of these tables, `width` is that of embeddings, and `gateway` has lines that
    stand behind its keys.
    """
    engines = {
        ENCODER: simulated_encoder(ENCODER, slots=encoder_slots, costs=encoding_costs, limits=encoder),
        PREFILL: simulated(PREFILL, "prefill", slots=slots, context_max=CONTEXT_MAX, costs=costs),
        DECODE: simulated(DECODE, "decode", slots=slots, context_max=CONTEXT_MAX, costs=costs),
    }
    for node in engines:
        engines[node] += WIDTH.format(
            name=node_engine_name(node), image=token_id(IMAGE_PAD), video=token_id(VIDEO_PAD), width=width
        )
    tables = gateway + MEDIA.format(media=lines(media or {}))
    return Plan(engines, gateway=tables, model_path=model, one_gateway=True)


def sglang_plan(
    model: Path,
    *,
    slots: int = 16,
    encoder: Mapping[str, object] | None = None,
    media: Mapping[str, object] | None = None,
    gateway: str = "",
) -> Plan:
    """Return the same plan with real engines on the CPU, which report their counts at each step."""
    engines = {
        ENCODER: SGLANG_ENCODER.format(name=node_engine_name(ENCODER), slots=slots, limits=lines(encoder or {})),
        PREFILL: sglang(PREFILL, slots=slots) + EACH_STEP.format(name=node_engine_name(PREFILL)),
        DECODE: sglang(DECODE, slots=slots) + EACH_STEP.format(name=node_engine_name(DECODE)),
    }
    tables = gateway + MEDIA.format(media=lines(media or {}))
    return Plan(engines, gateway=tables, model_path=model, one_gateway=True)
