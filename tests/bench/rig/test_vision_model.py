"""The model folder of the benches has a vision layout, and the files of their clusters are valid."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from actors.media.layout import PixelLimits
from actors.text.model import load
from bench.faults.media_aborts import LARGE, PIXELS_MAX, plan
from bench.rig.cluster import Cluster
from bench.rig.vision_cluster import ENCODER, PREFILL
from bench.rig.vision_model import IMAGE_TOKEN, PIXELS_MIN, VIDEO_TOKEN, write_vision_model
from protocol.model_folder import FILES
from supervisor.engines.kinds import read_cluster


def test_the_model_has_a_layout_placeholders_and_a_template_with_parts(tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path / "model", pixels_max=PIXELS_MAX)
    files = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    model = load(files, None, strftime=time.strftime, salt="")
    assert model.vision is not None
    assert (model.vision.image_token, model.vision.video_token) == (IMAGE_TOKEN, VIDEO_TOKEN)
    assert model.vision.image == PixelLimits(PIXELS_MIN, PIXELS_MAX)
    assert model.vision.fit_image(*LARGE).tokens <= PIXELS_MAX // 28**2
    placeholders = model.tokenizer.encode("a<|image_pad|>b<|video_pad|>").ids[1::2]
    assert placeholders == [IMAGE_TOKEN, VIDEO_TOKEN]


@pytest.mark.parametrize("narrow", [False, True])
def test_the_file_of_each_node_of_a_cluster_is_valid(tmp_path: Path, narrow: bool) -> None:
    target = Cluster(plan(write_vision_model(tmp_path / "model"), tmp_path, 80, narrow=narrow), tmp_path)
    for name in target.plan.names:
        (tmp_path / f"{name}.toml").write_text(target.file(name))
        cluster = read_cluster(tmp_path / f"{name}.toml")
        assert cluster.gateway_nodes == ("front",)
        assert cluster.encodes("tiny")
        assert cluster.engine[f"tiny-{ENCODER}"].leg == "encode"
        assert cluster.node[PREFILL].metrics is not None
