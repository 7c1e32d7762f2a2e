"""The vision tower of one model, without the language model: pixels to embeddings.

It makes SGLang's own encoder and calls its tower directly: SGLang's own entry for requests fetches URLs, and takes no
frames. On a CPU each item is computed by itself. A batch gains less than half of the time of small images there, and
nothing of large ones; and in a batch the same image has other embeddings, in their last bits, each time it has other
neighbours, so that an answer would depend on other requests. On a GPU, which small images leave mostly idle, items of a
modality are computed together. Written for SGLang 0.5.23.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from attrs import frozen
from sglang.srt.disaggregation.encoder.server import MMEncoder
from sglang.srt.managers.schedule_batch import MultimodalDataItem
from sglang.srt.runtime_context import publish
from sglang.srt.server_args import ServerArgs

from actors.engines.host.torch_tensors import NAMES, as_message
from actors.engines.media_check import check_pixels
from actors.engines.sglang.host.vision import towers
from actors.engines.sglang.host.vision.media_input import GRID_KEYS, MODALITIES
from actors.engines.sglang.host.vision.pixels import PixelProcessor, folder_layout
from actors.engines.sglang.spec import Setting
from actors.media.layout import smallest_item
from protocol.errors import EngineRefused, InternalError, RequestError
from protocol.messages.media import EmbeddingOutcome, MediaForm, MediaInfo, MediaItem, Modality


@frozen
class VisionTower:
    """The vision tower, and the processors in front of it."""

    encoder: MMEncoder
    pixels: PixelProcessor
    media: MediaInfo
    together: bool  # whether items of one modality are computed at once

    def encode(self, items: Sequence[MediaItem], is_wanted: Callable[[], bool]) -> list[EmbeddingOutcome]:
        """Return the outcomes of the items, in their order; only the first ones' once `is_wanted` is false."""
        if not self.together:
            outcomes = []
            for item in items:
                if not is_wanted():
                    break
                outcomes += self._encode([item])
            return outcomes
        by_index: dict[int, EmbeddingOutcome] = {}
        for modality in Modality:
            indices = [index for index, item in enumerate(items) if item.modality is modality]
            by_index |= zip(indices, self._encode([items[index] for index in indices]), strict=True)
        return [by_index[index] for index in range(len(items))]

    def _encode(self, items: Sequence[MediaItem]) -> list[EmbeddingOutcome]:
        """Return the outcomes of items of one modality, each with an error of its own if it is wrong."""
        outcomes: list[EmbeddingOutcome | torch.Tensor] = [self._patches(item) for item in items]
        pairs = zip(items, outcomes, strict=True)
        inputs = [(item, patches) for item, patches in pairs if isinstance(patches, torch.Tensor)]
        computed = iter(self._computed(inputs))
        return [next(computed) if isinstance(outcome, torch.Tensor) else outcome for outcome in outcomes]

    def _patches(self, item: MediaItem) -> torch.Tensor | EmbeddingOutcome:
        try:
            check_pixels(item, self.media)
            return self.pixels.patches(item)
        except RequestError as error:
            return EmbeddingOutcome(code=error.code, detail=error.detail)
        except Exception as error:  # noqa: BLE001  # transformers or torchvision refuse this item alone
            traceback.print_exception(error, file=sys.stderr)
            detail = f"the {item.modality} could not be processed: {type(error).__name__}"
            return EmbeddingOutcome(code=EngineRefused.code, detail=detail)

    def _computed(self, inputs: Sequence[tuple[MediaItem, torch.Tensor]]) -> list[EmbeddingOutcome]:
        """Return the outcomes of patches; after a failure each is tried alone, to find the failing one."""
        if not inputs:
            return []
        try:
            return [_outcome(rows) for rows in self._rows(inputs)]
        except Exception as error:  # noqa: BLE001  # any error here is a fault of the tower
            if len(inputs) > 1:
                return [outcome for one in inputs for outcome in self._computed([one])]
            traceback.print_exception(error, file=sys.stderr)
            return [_failed(f"the encoder failed: {type(error).__name__}")]

    def _rows(self, inputs: Sequence[tuple[MediaItem, torch.Tensor]]) -> list[torch.Tensor]:
        """Return the embeddings of each item, `[tokens, width]`."""
        model, modality = self.encoder.model, inputs[0][0].modality
        items = [
            MultimodalDataItem(
                modality=MODALITIES[modality],
                feature=patches.to(self.encoder.device),
                model_specific_data={GRID_KEYS[modality]: torch.tensor([item.grid])},
            )
            for item, patches in inputs
        ]
        compute = model.get_image_feature if modality is Modality.IMAGE else model.get_video_feature
        with torch.inference_mode():
            rows: torch.Tensor = compute(items).cpu()
        # Each in memory of its own: else one that is kept keeps all of them.
        return [part.clone() for part in torch.split(rows, [item.tokens for item, _ in inputs])]


def _outcome(rows: torch.Tensor) -> EmbeddingOutcome:
    if not bool(torch.isfinite(rows).all()):
        return _failed("the encoder made embeddings that are no numbers")
    return EmbeddingOutcome(as_message(rows))


def _failed(detail: str) -> EmbeddingOutcome:
    return EmbeddingOutcome(code=InternalError.code, detail=detail)


def make_tower(arguments: dict[str, Setting], folder: Path) -> VisionTower:
    """Return the vision tower that SGLang's arguments describe; `folder` is this process's own.

    Raises `ValueError` for a model without a tower, and SGLang's own errors.
    """
    layout = folder_layout(str(arguments["model_path"]))
    if layout is None:
        raise ValueError("the model has no vision tower, or one of an unsupported family")
    towers.leave_out_language()
    server_args = ServerArgs(**arguments)
    publish(server_args, role="encoder")
    # The rendezvous is a file, since a port could be taken.
    encoder = MMEncoder(server_args, dist_init_method=f"file://{folder}/rendezvous")
    own, config = encoder.preprocessor, encoder.model_config
    pixels = PixelProcessor(own.image_processor, own.video_processor, layout, config.dtype)
    media = MediaInfo(
        form=MediaForm.EMBEDDINGS,
        width=config.hidden_size,
        dtype=NAMES[config.dtype],
        merge=layout.merge,
        image_token=layout.image_token,
        video_token=layout.video_token,
    )
    tower = VisionTower(encoder, pixels, media, together=encoder.device != "cpu")
    _warm_up(tower)
    return tower


def _warm_up(tower: VisionTower) -> None:
    """Encode one small item; raises `RuntimeError` unless its embeddings have the form in the encoder's media."""
    item = smallest_item(tower.pixels.layout)
    (outcome,) = tower.encode([item], lambda: True)
    if outcome.code:
        raise RuntimeError(f"it does not encode an {item.modality}: {outcome.detail}")
    made, wanted = (outcome.data.shape, outcome.data.dtype), ((item.tokens, tower.media.width), tower.media.dtype)
    if made != wanted:
        raise RuntimeError(f"it makes embeddings of {made}, where the model's engines take {wanted}")
