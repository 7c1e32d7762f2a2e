"""The input of requests of a model that takes images, made by TensorRT-LLM's own input processor.

Of a request with images it is given the outline (`actors/engines/trtllm/images.py`), by `LLM.preprocess`, in a thread:
it resizes pixels and tokenises. Embeddings are put into shared memory here, and pixels by `LLM.preprocess`.
TensorRT-LLM opens their handles once; a handle that it has not been given is opened here, or its memory would stay.

TensorRT-LLM keeps the cached blocks of images apart by their hashes. Once it has failed to make one, it makes none any
more, and a decode has none at all. Such requests get a cache salt of their images instead.

Such a model has positions in two dimensions even for a text. TensorRT-LLM computes them from pixels; for any other
request, a decode's among them, they are passed on by handles as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import torch
from attrs import define, field
from PIL import Image

from actors.engines.host.served_link import last_line
from actors.engines.host.torch_tensors import as_torch
from actors.engines.trtllm.host.library import CALL_ERRORS, Images, Library, Llm, Preprocessed
from actors.engines.trtllm.images import (
    Outline,
    PlacedImages,
    hash_words,
    image_salt,
    placed_images,
    positions,
)
from protocol.errors import EngineRefused, InternalError
from protocol.messages.engine import EngineInfo, HandOff
from protocol.messages.generation import Generate
from protocol.messages.media import MediaForm, MediaInfo, MediaItem

THREADS = 2
METHOD = "method_key"
"""What each handle of a shared tensor has."""

WHOLE = "context_and_generation"
"""The type of a request that one engine computes alone."""


def picture(item: MediaItem) -> Image.Image:
    """Return the pixels of an image as TensorRT-LLM takes them."""
    return Image.fromarray(as_torch(item.data)[0].numpy())


@define(eq=False)
class SharedTensorList:
    """The shared tensors of one request; those that are made here stay in memory until it ends."""

    names: Library
    _tensors: list[torch.Tensor] = field(init=False, factory=list)
    _handles: list[Mapping[str, object]] = field(init=False, factory=list)

    def handle(self, tensor: torch.Tensor) -> dict[str, object]:
        """Share a tensor, and return its handle."""
        handle = self.names.shared_tensors.from_tensor(tensor).dump_to_dict()
        self._tensors.append(tensor)
        self._handles.append(handle)
        return handle

    def take(self, tensors: object) -> None:
        """Take the handles that TensorRT-LLM has made of the tensors of a request."""
        self._handles.extend(_handles_in(tensors))

    def open_all(self) -> None:
        """Open all handles, as the engine has been given none of them; leaves out those that cannot be opened."""
        handles, self._handles = self._handles, []
        for handle in handles:
            try:
                self.names.shared_tensors.from_dict(handle).get_local_view()
            except Exception as error:  # noqa: BLE001  # the error that led here is the request's
                last_line(error)


def _handles_in(tensors: object) -> Iterator[Mapping[str, object]]:
    """Yield the handles in dictionaries and lists of any depth."""
    if isinstance(tensors, Mapping):
        if METHOD in tensors:
            yield cast("Mapping[str, object]", tensors)
        else:
            for value in tensors.values():
                yield from _handles_in(value)
    elif isinstance(tensors, list | tuple):
        for value in tensors:
            yield from _handles_in(value)


@define(eq=False)
class ImageInput:
    """Makes the input of one engine whose model takes images."""

    llm: Llm
    names: Library
    info: EngineInfo
    outline: Outline
    _threads: ThreadPoolExecutor = field(init=False, factory=lambda: ThreadPoolExecutor(THREADS, "images"))

    def __attrs_post_init__(self) -> None:
        # TensorRT-LLM changes this of the whole process for each handle, and back: another thread would lose it.
        torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]

    async def arguments(
        self, request: Generate, given: Mapping[str, object]
    ) -> tuple[dict[str, object], SharedTensorList]:
        """Return the arguments of `generate_async` for the `given` ones, with the shared tensors of the request.

        Raises `BadRequest` for parts that contradict each other, `EngineRefused` where TensorRT-LLM sees images of
        other sizes, `InternalError` where it fails with them, and its own errors of a call.
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
        asked, sees_pixels = {**given}, bool(placed) and self.info.media_form is MediaForm.PIXELS
        is_hashed = self.info.hand_off is HandOff.NONE
        try:
            if not sees_pixels:
                handed = asked["disaggregated_params"] = handed or self.names.disaggregated_params(request_type=WHOLE)
                self._share(request, placed, handed, shared)
            if placed and self.info.media_form is not MediaForm.PLACES:
                made, images = self._preprocess(request, placed, asked, pictured=sees_pixels)
                if sees_pixels:
                    shared.take(images.multimodal_data)
                is_hashed = is_hashed and images.multimodal_input is not None
                made.prompt_token_ids = self.outline.filled(request.tokens.tolist(), made.prompt_token_ids, placed)
                asked["inputs"] = made
        except BaseException:
            shared.open_all()
            raise
        if placed and not is_hashed:
            asked["cache_salt"] = image_salt(placed, cast("str | None", given.get("cache_salt")))
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

    def _preprocess(
        self, request: Generate, placed: PlacedImages, given: Mapping[str, object], *, pictured: bool
    ) -> tuple[Preprocessed, Images]:
        """Return TensorRT-LLM's input of a request with images, which has the tokens of its outline, and the images."""
        assert self.info.media is not None
        assert self.info.media.image_token is not None
        written = self.outline.written(len(request.tokens), placed, self.info.media.image_token)
        texts = {token: self.llm.tokenizer.decode([token], skip_special_tokens=False) for token in {*written}}
        inputs: dict[str, object] = {"prompt": "".join(texts[token] for token in written)}
        if pictured:
            pictures = {"image": [picture(item) for item, _ in placed]}
            inputs |= {"multi_modal_data": pictures, "mm_processor_kwargs": {}}
        try:
            made = self.llm.preprocess(
                inputs=inputs,
                sampling_params=given["sampling_params"],
                disaggregated_params=given.get("disaggregated_params"),
            )
        except CALL_ERRORS:
            raise
        except Exception as error:  # of this input alone: the engine has not been asked
            last_line(error)
            raise InternalError(f"TensorRT-LLM failed with the images: {type(error).__name__}") from error
        if made.multimodal_params is None:
            raise EngineRefused("TensorRT-LLM leaves out the images of a prompt")
        return made, made.multimodal_params


def _positions(count: int, placed: PlacedImages, merge: int) -> tuple[torch.Tensor, int]:
    """Return the positions of a prompt's tokens, `[3, 1, count]`, and by how much the next token's differs."""
    if not placed:
        return torch.arange(count).expand(3, 1, count).contiguous(), 0
    found = positions(count, placed, merge)
    return torch.tensor(found.axes).unsqueeze(1), found.delta
