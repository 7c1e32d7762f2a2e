"""Tiny random models that take images and videos, made once and kept: for tests of equal tokens, not of what they say."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny"
CPU_PATCHES = ROOT / "actors" / "engines" / "sglang" / "host" / "cpu"
FAMILIES = ("qwen2_vl", "qwen2_5_vl")
SPECIALS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_pad|>")
MADE_WITHIN_S = 180.0
TEMPLATE = """
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}{{- part['text'] -}}
{%- else -%}{{- '<|vision_start|><|' + part['type'] + '_pad|><|vision_end|>' -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
TEXT: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 528,
    "max_position_embeddings": 8192,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "type": "mrope",
        "mrope_section": [2, 3, 3],
        "rope_theta": 10000.0,
    },
}
TOWERS: dict[str, dict[str, object]] = {
    "qwen2_vl": {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "in_channels": 3},
    "qwen2_5_vl": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "in_channels": 3,
        "window_size": 112,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    },
}
TOWER: dict[str, object] = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "initializer_range": 0.2,
}
NORMALISED = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
PATCHES = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}


def random_vision_model(family: str) -> Path:
    """Return the folder of the model of a family, which the first call makes in a process of its own."""
    digest = blake2b(b"".join(path.read_bytes() for path in (Path(__file__), TINY / "tokenizer.json")), digest_size=6)
    cache = ROOT / "build" / "vision-models"
    folder = cache / f"{family}-{digest.hexdigest()}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{family}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two runs of tests, one makes it
        if not folder.exists():
            with TemporaryDirectory(dir=cache) as temporary:
                _make_in_process(family, Path(temporary) / folder.name)
                (Path(temporary) / folder.name).rename(folder)
    return folder


def _make_in_process(family: str, folder: Path) -> None:
    # torch and transformers take some 500 MB and seconds to import, which the process of the tests is spared.
    path = os.pathsep.join(map(str, (ROOT, CPU_PATCHES)))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.rig.random_vision_models", family, str(folder)]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=MADE_WITHIN_S, check=False
    )
    assert done.returncode == 0, done.stderr


def write_text_files(folder: Path) -> dict[str, int]:
    """Write the tokenizer, the template and the processors of a model; return the ids of its special tokens."""
    from tokenizers import Tokenizer

    folder.mkdir()
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    tokenizer.add_special_tokens([*SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    for name in ("tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    ids = {name: token for name in SPECIALS if (token := tokenizer.token_to_id(name)) is not None}
    assert max(ids.values()) < TEXT["vocab_size"]  # type: ignore[operator]  # a number
    return ids


def write_processors(folder: Path, family: str) -> None:
    """Write the settings of a model's processors of images and videos, as older versions of transformers do."""
    common = {
        **PATCHES,
        **NORMALISED,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "processor_class": "Qwen2VLProcessor" if family == "qwen2_vl" else "Qwen2_5_VLProcessor",
    }
    image = {
        **common,
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 3136, "longest_edge": 1003520},
    }
    video = {
        **common,
        "video_processor_type": "Qwen2VLVideoProcessor",
        "size": {"shortest_edge": 100352, "longest_edge": 602112},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(image, indent=2))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video, indent=2))


def make(family: str, folder: Path) -> None:
    """Write the model of a family into a folder."""
    import espalier_sglang_cpu

    espalier_sglang_cpu.prepare()  # before torchvision is imported

    import torch
    import transformers

    ids = write_text_files(folder)
    write_processors(folder, family)
    names = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}
    ends = json.loads((TINY / "generation_config.json").read_text())["eos_token_id"]
    config = getattr(transformers, f"{names[family]}Config")(
        text_config={**TEXT, "eos_token_id": ends, "bos_token_id": None},
        vision_config={**TOWER, **TOWERS[family]},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        vision_token_id=ids["<|vision_pad|>"],
        eos_token_id=ends,
        tie_word_embeddings=False,
    )
    torch.manual_seed(7)
    torch.set_num_threads(1)
    model = getattr(transformers, f"{names[family]}ForConditionalGeneration")(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    written["vision_config"]["in_chans"] = 3  # SGLang's name for it
    (folder / "config.json").write_text(json.dumps(written, indent=1))


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
