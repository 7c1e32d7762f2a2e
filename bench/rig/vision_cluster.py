"""Clusters for pictures: a front that fetches and decodes them, an encoder, and engines for their embeddings.

Only the front has a gateway, and so a media actor with its decoders; the other nodes have endpoints for metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench.rig.cluster import Plan, lines, node_engine_name, simulated
from bench.rig.vision_model import IMAGE_TOKEN, VIDEO_TOKEN

ENCODER, PREFILL, DECODE = "encoder", "prefill", "decode"
CONTEXT_MAX = 65_536

SIMULATED_ENCODER = """\
kind = "simulated"
leg = "encode"
slots = {slots}
[engine.{name}.encoder]
{limits}
[engine.{name}.simulated.encoding_costs]
{costs}
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

    `encoder` and `media` are the keys of these tables, `width` is the embeddings', and `gateway` has further lines of
    its table.
    """
    engines = {
        ENCODER: SIMULATED_ENCODER.format(
            name=node_engine_name(ENCODER),
            slots=encoder_slots,
            limits=lines(encoder or {}),
            costs=lines(encoding_costs or {}),
        ),
        PREFILL: simulated(PREFILL, "prefill", slots=slots, context_max=CONTEXT_MAX, costs=costs),
        DECODE: simulated(DECODE, "decode", slots=slots, context_max=CONTEXT_MAX, costs=costs),
    }
    for node in engines:
        engines[node] += WIDTH.format(name=node_engine_name(node), image=IMAGE_TOKEN, video=VIDEO_TOKEN, width=width)
    tables = gateway + MEDIA.format(media=lines(media or {}))
    return Plan(engines, gateway=tables, model_path=model, one_gateway=True)
