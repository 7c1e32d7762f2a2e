"""Images and videos of requests as SGLang's scheduler computes with them.

SGLang's own processors are not asked. They would cut an item anew, name it by 64 bits of a hash of its tensor, and keep
several embeddings of one request as one item; and they take contradicting parts in silence, or the scheduler crashes on
them. So each item is made here, with its digest as its identity, at its places in the prompt, and every number that two
parts of a request state is compared before SGLang sees either.

The work runs in few threads: they share the interpreter with the tokens of all requests. Written for SGLang 0.5.23.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from attrs import define, evolve, field
from sglang.srt.layers.rotary_embedding import MRotaryEmbedding
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import (
    MultimodalDataItem,
    MultimodalInputFormat,
    MultimodalProcessorOutput,
)
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from actors.engines.host.torch_tensors import DTYPES, NAMES, as_message, as_torch
from actors.engines.media_check import check_media, item_places
from actors.engines.sglang.host.vision.pixels import PixelProcessor
from actors.engines.sglang.host.vision.scheduler_tensors import SchedulerTensors
from actors.media.layout import VisionLayout, smallest_item
from protocol.errors import BadRequest
from protocol.messages.engine import EngineInfo
from protocol.messages.generation import Generate, Sampling
from protocol.messages.media import MediaForm, MediaInfo, MediaItem, Modality
from protocol.token_ids import TokenIds

THREADS = 2
TIMED_FAMILIES = frozenset({"qwen2_5_vl"})  # families whose positions depend on the time between two steps of a video
GRID_KEYS = {Modality.IMAGE: "image_grid_thw", Modality.VIDEO: "video_grid_thw"}
MODALITIES = {Modality.IMAGE: schedule_batch.Modality.IMAGE, Modality.VIDEO: schedule_batch.Modality.VIDEO}


def media_info(manager: TokenizerManager, layout: VisionLayout | None, form: MediaForm) -> MediaInfo | None:
    """Return the images and videos that an engine takes, None if it takes text alone; `form` is its input.

    Raises `RuntimeError` if SGLang and the model's folder disagree about the placeholders.
    """
    processor = manager.mm_processor
    if processor is None or layout is None:
        return None
    own = processor.mm_tokens.image_token_id, processor.mm_tokens.video_token_id
    if own != (layout.image_token, layout.video_token):
        raise RuntimeError(f"SGLang has the placeholders {own}, and the model's folder those of {layout}")
    return MediaInfo(
        form=form,
        width=manager.model_config.hidden_size,
        dtype=NAMES[manager.model_config.dtype],
        merge=layout.merge,
        image_token=layout.image_token,
        video_token=layout.video_token,
        start_token=processor.vision_start_token_id,
    )


@define(eq=False)
class MediaInput:
    """Makes the input of one engine that takes images or videos."""

    manager: TokenizerManager
    info: EngineInfo
    layout: VisionLayout
    shared: SchedulerTensors
    _media: MediaInfo = field(init=False)
    _pixels: PixelProcessor = field(init=False)
    _threads: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(THREADS, "media"))
    _free: asyncio.Semaphore = field(factory=lambda: asyncio.Semaphore(THREADS))

    def __attrs_post_init__(self) -> None:
        assert self.info.media is not None
        self._media = self.info.media
        processor = self.manager.mm_processor
        own = processor._processor  # noqa: SLF001
        dtype = self.manager.model_config.dtype
        self._pixels = PixelProcessor(own.image_processor, own.video_processor, self.layout, dtype)
        processor.process_mm_data_async = _given

    async def output(self, request: Generate) -> MultimodalProcessorOutput:
        """Return the input of a request, to be given to SGLang as its `image_data`, and to `discard` when it has ended.

        Raises `BadRequest` for items that the engine cannot compute with. The input for a cancelled caller is
        discarded; at most `THREADS` inputs are made at a time.
        """
        await self._free.acquire()
        made = asyncio.get_running_loop().run_in_executor(self._threads, self._output, request)
        made.add_done_callback(lambda _: self._free.release())
        try:
            return await asyncio.shield(made)
        except asyncio.CancelledError:
            made.add_done_callback(self._drop)
            raise

    def discard(self, output: MultimodalProcessorOutput) -> None:
        """Remove the tensors of an input that no scheduler has received."""
        for item in output.mm_items:
            self.shared.discard((item.feature, item.precomputed_embeddings))

    def picture(self) -> Generate | None:
        """Return a request about one small item, in the form that the engine takes; None if there is no room for it."""
        item, form, media = smallest_item(self.layout), self.info.media_form, self._media
        tokens = [media.start_token or 0, *[media.placeholder(item.modality) or 0] * item.tokens, 0]
        if form is MediaForm.PLACES:
            item = item.place
        elif form is MediaForm.EMBEDDINGS:
            rows = torch.zeros(item.tokens, media.width, dtype=DTYPES[media.dtype])
            item = evolve(item, form=form, data=as_message(rows))
        fits = len(tokens) < self.info.request_tokens_max
        return Generate("", TokenIds.of(tokens), Sampling(1), media=(item,)) if fits else None

    def _drop(self, made: asyncio.Future[MultimodalProcessorOutput]) -> None:
        with suppress(Exception):  # its caller has left: no error has a reader
            self.discard(made.result())

    # In a thread ---------------------------------------------------------------------------

    def _output(self, request: Generate) -> MultimodalProcessorOutput:
        check_media(request, self.info)
        places = item_places(request, self._media)
        order = sorted(range(len(places)), key=lambda number: places[number].start)
        pairs = [(request.media[number], places[number]) for number in order]
        made: list[MultimodalDataItem] = []
        try:
            for item, place in pairs:
                made.append(self._item(item, place))
            positions, delta = self._positions(request.tokens, pairs)
        except BaseException:
            for done in made:
                self.shared.discard((done.feature, done.precomputed_embeddings))
            raise
        processor, ids = self.manager.mm_processor, request.tokens.tolist()
        return MultimodalProcessorOutput(
            mm_items=made,
            input_ids=ids,
            padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(ids, made),
            im_start_id=processor.vision_start_token_id,
            im_end_id=processor.vision_end_token_id,
            im_token_id=self._media.image_token,
            video_token_id=self._media.video_token,
            mrope_positions=positions,
            mrope_position_delta=delta,
        )

    def _item(self, item: MediaItem, place: range) -> MultimodalDataItem:
        made = MultimodalDataItem(
            modality=MODALITIES[item.modality],
            offsets=[(place.start, place.stop - 1)],
            format=MultimodalInputFormat.PROCESSOR_OUTPUT,
            model_specific_data={GRID_KEYS[item.modality]: torch.tensor([item.grid])},
        )
        made.set_identity(bytes.fromhex(item.digest))
        if item.form is MediaForm.EMBEDDINGS:
            made.precomputed_embeddings = self.shared.share(_finite(item))
        elif item.form is MediaForm.PIXELS:
            made.feature = self.shared.share(self._pixels.patches(item))
        return made

    def _positions(
        self, tokens: Sequence[int], pairs: Sequence[tuple[MediaItem, range]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions of each token in time, height and width, and by how much the next one differs.

        They depend on where the items are and on nothing else of the prompt, which may have their tokens in a text.
        """
        processor, media = self.manager.mm_processor, self._media
        start = processor.vision_start_token_id
        special = {start, media.image_token, media.video_token}
        outline = [next(token for token in range(len(special) + 1) if token not in special)] * len(tokens)
        for item, place in pairs:
            outline[place.start - 1] = start
            outline[place.start : place.stop] = [media.placeholder(item.modality) or 0] * len(place)
        grids = {key: [item.grid for item, _ in pairs if item.modality is key] for key in Modality}
        positions, delta = MRotaryEmbedding.get_rope_index(
            spatial_merge_size=media.merge,
            image_token_id=media.image_token,
            video_token_id=media.video_token,
            vision_start_token_id=start,
            model_type=processor.model_type,
            tokens_per_second=processor._tokens_per_second,  # noqa: SLF001
            input_ids=torch.tensor([outline]),
            second_per_grid_ts=self._seconds(pairs),
            **{GRID_KEYS[key]: torch.tensor(given) if given else None for key, given in grids.items()},
        )
        return positions.squeeze(1), delta

    def _seconds(self, pairs: Sequence[tuple[MediaItem, range]]) -> list[float] | None:
        """Return the time between two steps of each video's grid, None for a family whose positions do not use it."""
        videos = [item.seconds_per_grid for item, _ in pairs if item.modality is Modality.VIDEO]
        if not videos or self.manager.mm_processor.model_type not in TIMED_FAMILIES:
            return None
        given = [seconds for seconds in videos if seconds is not None]
        if len(given) < len(videos):
            raise BadRequest(f"{len(videos)} videos state the time between two steps of their grids {len(given)} times")
        return given


async def _given(image_data: Sequence[MultimodalProcessorOutput], **_: object) -> MultimodalProcessorOutput:
    """Return the input that was made already, instead of SGLang's own processor."""
    return image_data[0]


def _finite(item: MediaItem) -> torch.Tensor:
    """Return the embeddings of an item; raises `BadRequest` for NaN or infinity, by which no token can be drawn."""
    embeddings = as_torch(item.data)
    if not bool(torch.isfinite(embeddings).all()):
        raise BadRequest(f"not all of the {embeddings.numel()} elements of an item's embeddings are finite numbers")
    return embeddings
