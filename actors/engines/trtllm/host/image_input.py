"""The input of requests of a model that takes images, made by TensorRT-LLM's own input processor.

Of a request with images it is given the outline (`actors/engines/trtllm/images.py`), by `LLM.preprocess`, in a thread:
it resizes pixels and tokenises. Embeddings are put into shared memory, whose handles TensorRT-LLM
opens once; a handle that it has not been given is opened here, or its memory would stay.

Such a model has positions in two dimensions even for a text. TensorRT-LLM computes them from pixels; for any other
request, a decode's among them, they are passed on by handles as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from attrs import define, field
from PIL import Image

from actors.engines.host.torch_tensors import as_torch
from actors.engines.trtllm.host.library import Library, Llm
from actors.engines.trtllm.images import (
    Outline,
    PlacedImages,
    hash_words,
    placed_images,
    positions,
)
from protocol.messages.engine import EngineInfo
from protocol.messages.generation import Generate
from protocol.messages.media import MediaForm, MediaInfo, MediaItem

THREADS = 2
WHOLE = "context_and_generation"
"""The type of a request that one engine computes alone."""


def picture(item: MediaItem) -> Image.Image:
    """Return the pixels of an image as TensorRT-LLM takes them."""
    return Image.fromarray(as_torch(item.data)[0].numpy())


@define(eq=False)
class SharedTensorList:
    """The shared tensors of one request; they stay in memory until it ends."""

    names: Library
    _tensors: list[torch.Tensor] = field(init=False, factory=list)
    _handles: list[Mapping[str, object]] = field(init=False, factory=list)

    def handle(self, tensor: torch.Tensor) -> dict[str, object]:
        """Share a tensor, and return its handle."""
        handle = self.names.shared_tensors.from_tensor(tensor).dump_to_dict()
        self._tensors.append(tensor)
        self._handles.append(handle)
        return handle

    def open_all(self) -> None:
        """Open all handles; the engine has been given none of them."""
        for handle in self._handles:
            self.names.shared_tensors.from_dict(handle).get_local_view()


@define(eq=False)
class ImageInput:
    """Makes the input of one engine whose model takes images."""

    llm: Llm
    names: Library
    info: EngineInfo
    outline: Outline
    _threads: ThreadPoolExecutor = field(init=False, factory=lambda: ThreadPoolExecutor(THREADS, "images"))

    async def arguments(
        self, request: Generate, given: Mapping[str, object]
    ) -> tuple[dict[str, object], SharedTensorList]:
        """Return the arguments of `generate_async` for the `given` ones, with the shared tensors of the request.

        Raises `BadRequest` for parts that contradict each other, `EngineRefused` where TensorRT-LLM sees images of
        other sizes, and TensorRT-LLM's own errors.
        """
        assert self.info.media is not None
        shared = SharedTensorList(self.names)
        if not request.media or self.info.media_form is MediaForm.PLACES:  # a text waits behind no image
            return self._arguments(request, given, self.info.media, shared), shared
        made = asyncio.get_running_loop().run_in_executor(
            self._threads, self._arguments, request, given, self.info.media, shared
        )
        try:
            return await asyncio.shield(made), shared
        except asyncio.CancelledError:
            made.add_done_callback(lambda made: None if made.exception() else shared.open_all())
            raise

    # In a thread, if there are images ------------------------------------------------------

    def _arguments(
        self, request: Generate, given: Mapping[str, object], media: MediaInfo, shared: SharedTensorList
    ) -> dict[str, object]:
        placed = placed_images(request, media)
        handed = given.get("disaggregated_params")
        if placed and self.info.media_form is MediaForm.PIXELS:
            pictures = {"image": [picture(item) for item, _ in placed]}
            more = {"multi_modal_data": pictures, "mm_processor_kwargs": {}}
            return {**given, "inputs": self._preprocessed(request, placed, {**given, **more})}
        handed = handed or self.names.disaggregated_params(request_type=WHOLE)
        asked = {**given, "disaggregated_params": handed}
        try:
            self._share(request, placed, handed, shared)
            if placed and self.info.media_form is MediaForm.EMBEDDINGS:
                asked["inputs"] = self._preprocessed(request, placed, asked)
        except BaseException:
            with suppress(Exception):  # the first error is the request's
                shared.open_all()
            raise
        return asked

    def _share(self, request: Generate, placed: PlacedImages, handed: object, shared: SharedTensorList) -> None:
        """Share the positions of a prompt and its embeddings, and name their handles in `handed`."""
        assert self.info.media is not None
        axes, delta = _positions(len(request.tokens), placed, self.info.media.merge)
        fields: dict[str, object] = {
            "mrope_position_ids_handle": shared.handle(axes),
            "mrope_position_deltas_handle": shared.handle(torch.tensor([[delta]], dtype=torch.int32)),
        }
        if placed and self.info.media_form is MediaForm.EMBEDDINGS:
            fields["multimodal_embedding_handles"] = [shared.handle(as_torch(item.data).clone()) for item, _ in placed]
            fields["multimodal_hashes"] = [hash_words(item.digest) for item, _ in placed]
        for name, value in fields.items():
            setattr(handed, name, value)

    def _preprocessed(self, request: Generate, placed: PlacedImages, given: Mapping[str, object]) -> object:
        """Return TensorRT-LLM's input of a request with images, which has the request's own tokens."""
        assert self.info.media is not None
        assert self.info.media.image_token is not None
        own = request.tokens.tolist()
        written = self.outline.written(len(own), placed, self.info.media.image_token)
        texts = {token: self.llm.tokenizer.decode([token], skip_special_tokens=False) for token in {*written}}
        images = {name: given[name] for name in ("multi_modal_data", "mm_processor_kwargs") if name in given}
        made = self.llm.preprocess(
            inputs={"prompt": "".join(texts[token] for token in written), **images},
            sampling_params=given["sampling_params"],
            disaggregated_params=given.get("disaggregated_params"),
        )
        made.prompt_token_ids = self.outline.filled(own, made.prompt_token_ids, placed)
        return made


def _positions(count: int, placed: PlacedImages, merge: int) -> tuple[torch.Tensor, int]:
    """Return the positions of a prompt's tokens, `[3, 1, count]`, and by how much the next token's differs."""
    if not placed:
        return torch.arange(count).expand(3, 1, count).contiguous(), 0
    found = positions(count, placed, merge)
    return torch.tensor(found.axes).unsqueeze(1), found.delta
