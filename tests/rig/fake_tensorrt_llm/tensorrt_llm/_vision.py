"""The images of the fake: an input processor, and a tower whose embeddings follow from the pixels.

Placeholders stay in the vocabulary, embeddings need a text, and an image by embeddings counts as nearly square unless
positions come beside it: all as in the package. The arithmetic of sizes is that of transformers.
"""

import json
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256
from math import ceil, floor, sqrt
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from attrs import define
from PIL import Image
from tokenizers import Tokenizer

from ._faults import SLOW_S, Fault, fault_of
from ._torch.shared_tensor import SharedTensorContainer
from ._types import DisaggregatedParams, MultimodalParams, PreprocessedInputs

DISAGGREGATED = {"qwen2_5_vl"}  # the classes with `support_multimodal_disaggregated`


class TransformersTokenizer:
    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = True
    ) -> str:
        text: str = self._tokenizer.decode([*token_ids], skip_special_tokens=skip_special_tokens)
        return text.replace(" .", ".") if clean_up_tokenization_spaces else text


@define
class Vision:
    """The input processor and the tower of one model."""

    config: dict[str, Any]
    patch: int
    merge: int
    pixels: tuple[int, int]
    tokenizer: TransformersTokenizer

    @classmethod
    def of(cls, model: str | Path) -> "Vision | None":
        """Return those of a model's folder, None of a model that takes text alone."""
        folder = Path(model)
        if not (folder / "config.json").exists():
            return None
        config = json.loads((folder / "config.json").read_text())
        if "vision_config" not in config:
            return None
        image = json.loads((folder / "preprocessor_config.json").read_text())
        tower = config["vision_config"]
        return cls(
            config=config,
            patch=tower["patch_size"],
            merge=tower["spatial_merge_size"],
            pixels=(image["min_pixels"], image["max_pixels"]),
            tokenizer=TransformersTokenizer(folder),
        )

    @property
    def width(self) -> int:
        return int(self.config["text_config"]["hidden_size"])

    def grid(self, picture: Image.Image) -> tuple[int, int]:
        """Return the patches of an image in height and width, after its resizing."""
        side, (least, most) = self.patch * self.merge, self.pixels
        height, width = (max(side, round(length / side) * side) for length in (picture.height, picture.width))
        if height * width > most:
            shrink = sqrt(picture.height * picture.width / most)
            height, width = (
                max(side, floor(length / shrink / side) * side) for length in (picture.height, picture.width)
            )
        elif height * width < least:
            grow = sqrt(least / (picture.height * picture.width))
            height, width = (ceil(length * grow / side) * side for length in (picture.height, picture.width))
        return height // self.patch, width // self.patch

    def embed(self, picture: Image.Image) -> torch.Tensor:
        """Return the embeddings of an image, a row a token."""
        rows = self.tokens(self.grid(picture))
        chance = torch.Generator().manual_seed(crc32(picture.tobytes(), rows))
        return torch.randn(rows, self.width, generator=chance).to(getattr(torch, self.config["dtype"]))

    def tokens(self, grid: tuple[int, int]) -> int:
        return grid[0] * grid[1] // self.merge**2

    # Prompts -------------------------------------------------------------------------------

    def preprocess(self, inputs: Mapping[str, Any], handed: DisaggregatedParams | None) -> PreprocessedInputs:
        """Return the input of a prompt with images, as pixels or by the handles of their embeddings."""
        fault = fault_of(())
        if fault is Fault.IMAGES_FAIL:
            raise RuntimeError("Failed to convert tensor to shared tensor")
        if fault is Fault.IMAGES_SLOW:
            time.sleep(SLOW_S)
        handles = None if handed is None else handed.multimodal_embedding_handles
        if handles is not None:
            assert handed is not None
            return self._with_handles(inputs, handed, handles)
        pictures = inputs["multi_modal_data"]["image"]
        text = inputs.get("prompt") or self.tokenizer.decode(inputs["prompt_token_ids"])
        grids = [self.grid(each) for each in pictures]
        ids = self._expanded(text, [self.tokens(grid) for grid in grids])
        ids_of, delta = self.positions(ids, grids)
        config = {"mrope_position_ids": shared(ids_of), "mrope_position_deltas": shared(delta)}
        data = {"multimodal_embedding": [shared(self.embed(each)) for each in pictures], "mrope_config": config}
        if handed is not None:
            handed.mrope_position_ids_handle = config["mrope_position_ids"]
            handed.mrope_position_deltas_handle = config["mrope_position_deltas"]
        hashes = None if fault is Fault.UNHASHED else [[*sha256(each.tobytes()).digest()] for each in pictures]
        return PreprocessedInputs(ids, multimodal_params=MultimodalParams(hashes, data))

    def _with_handles(
        self, inputs: Mapping[str, Any], handed: DisaggregatedParams, handles: list[dict[str, Any]]
    ) -> PreprocessedInputs:
        if self.config["model_type"] not in DISAGGREGATED:
            raise ValueError("Multimodal disaggregated inference is not supported for this model")
        if not inputs.get("prompt"):
            raise ValueError("Text prompt is required but not provided")
        if any(each["tensor_size"][1] != self.width for each in handles):
            raise RuntimeError("Multimodal embedding hidden size must match model hidden size")
        ids = self._expanded(inputs["prompt"], [each["tensor_size"][0] for each in handles])
        if handed.multimodal_hashes is None or handed.mrope_position_ids_handle is None:
            raise ValueError("the real one would share cached images, and guess their positions")
        data = {"multimodal_embedding": handles, "mrope_config": handed_positions(handed)}
        return PreprocessedInputs(ids, multimodal_params=MultimodalParams(handed.multimodal_hashes, data))

    def _expanded(self, text: str, counts: list[int]) -> list[int]:
        image = self.config["image_token_id"]
        ids = self.tokenizer.encode(text)
        assert ids.count(image) == len(counts), "Number of images must match number of mm_handles"
        each = iter(counts)
        return [token for own in ids for token in ([image] * next(each) if own == image else [own])]

    def positions(self, ids: list[int], grids: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions of tokens, and by how much the next one's differs from its number."""
        found, following, place, images = list[tuple[int, int, int]](), 0, 0, iter(grids)
        while place < len(ids):
            if ids[place] != self.config["image_token_id"]:
                found.append((following, following, following))
                following, place = following + 1, place + 1
                continue
            height, width = (length // self.merge for length in next(images))
            found += [
                (following, following + row, following + column) for row in range(height) for column in range(width)
            ]
            following, place = following + max(height, width), place + height * width
        return torch.tensor(found).T.unsqueeze(1), torch.tensor([[following - len(ids)]], dtype=torch.int32)

    # The model -----------------------------------------------------------------------------

    def seen(self, params: MultimodalParams, count: int) -> int:
        """Return what the model knows of a prompt's images and positions; opens the handles."""
        data = params.multimodal_data
        config = {name: opened(value) for name, value in data["mrope_config"].items()}
        ids, deltas = config["mrope_position_ids"], config["mrope_position_deltas"]
        assert tuple(ids.shape) == (3, 1, count), f"positions of the shape {tuple(ids.shape)} for {count} tokens"
        assert (tuple(deltas.shape), deltas.dtype) == ((1, 1), torch.int32)
        text = torch.arange(count) + int(deltas)  # of the tokens behind the last image, and of a resumed answer
        others = (ids[:, 0] != text).any(0).nonzero()
        last = int(others.max()) + 1 if len(others) else 0
        known = crc32(ids[:, 0, :last].to(torch.int64).contiguous().numpy().tobytes(), int(deltas) % 2**32)
        for each in map(opened, data.get("multimodal_embedding") or ()):
            known = crc32(each.contiguous().view(torch.uint8).numpy().tobytes(), known)
        return known


def handed_positions(handed: DisaggregatedParams) -> dict[str, Any]:
    return {
        "mrope_position_ids": handed.mrope_position_ids_handle,
        "mrope_position_deltas": handed.mrope_position_deltas_handle,
    }


def shared(tensor: torch.Tensor) -> dict[str, Any]:
    return SharedTensorContainer.from_tensor(tensor).dump_to_dict()


def opened(value: Any) -> Any:
    return SharedTensorContainer.from_dict(value).get_local_view() if isinstance(value, dict) else value
