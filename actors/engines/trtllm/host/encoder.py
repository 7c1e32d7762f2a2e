"""The host of an encoder: TensorRT-LLM's `MultimodalEncoder`, which encodes each image as a request of its own.

It returns handles of memory on this host, on a GPU where it is one. They are opened here at once, and the embeddings
leave as those of every encoder do: so an encoder and an engine need not be on one host.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from attrs import frozen

from actors.engines import leftover_memory, model_files
from actors.engines.host.encoder_host import STREAMS_MAX, EncoderHost
from actors.engines.host.failed_start import fail_start
from actors.engines.host.torch_tensors import as_message
from actors.engines.host.watchdog import Watchdog, print_reason
from actors.engines.media_check import check_pixels
from actors.engines.trtllm.boot_message import TrtllmBoot
from actors.engines.trtllm.host import library
from actors.engines.trtllm.host.image_input import picture
from actors.engines.trtllm.host.library import CALL_ERRORS, EncodedImage, ImageEncoder, Library
from actors.engines.trtllm.host.translation import model_folder
from actors.engines.trtllm.images import AUTO, media_info
from actors.media.layout import smallest_item
from actors.media.model_files import vision_layout
from protocol.errors import EngineRefused, InternalError, RequestError
from protocol.link.peer import Peer
from protocol.messages.engine import encoder_info
from protocol.messages.media import EmbeddingOutcome, MediaForm, MediaInfo, MediaItem


@frozen
class TrtllmTower:
    """The vision tower of one model, inside an encoder of TensorRT-LLM."""

    encoder: ImageEncoder
    names: Library
    media: MediaInfo

    def encode(self, items: Sequence[MediaItem], is_wanted: Callable[[], bool]) -> list[EmbeddingOutcome]:
        """Return one outcome an item, in their order: all are computed together, and a wrong one fails alone."""
        begun = [self._begin(item) for item in items if is_wanted()]
        return [self._outcome(each) for each in begun]

    def _begin(self, item: MediaItem) -> EncodedImage | RequestError:
        try:
            check_pixels(item, self.media)
            tokens = [token for token in (self.media.start_token, self.media.image_token) if token is not None]
            return self.encoder.generate_async(
                inputs={
                    "prompt_token_ids": tokens,
                    "multi_modal_data": {"image": [picture(item)]},
                    "mm_processor_kwargs": {},
                }
            )
        except RequestError as error:
            return error
        except CALL_ERRORS as error:
            return EngineRefused(str(error))

    def _outcome(self, begun: EncodedImage | RequestError) -> EmbeddingOutcome:
        if isinstance(begun, RequestError):
            return EmbeddingOutcome(code=begun.code, detail=begun.detail)
        try:
            handed = begun.result().disaggregated_params
        except self.names.request_error as error:  # of this image alone
            return EmbeddingOutcome(code=EngineRefused.code, detail=str(error))
        handles = (handed.multimodal_embedding_handles if handed is not None else None) or ()
        opened = [self.names.shared_tensors.from_dict(handle).get_local_view() for handle in handles]
        if len(opened) != 1:
            return EmbeddingOutcome(
                code=InternalError.code, detail=f"TensorRT-LLM returned {len(opened)} tensors for an image"
            )
        return EmbeddingOutcome(as_message(opened[0].cpu().clone()))


def make_tower(boot: TrtllmBoot, names: Library) -> TrtllmTower:
    """Return the tower that `boot` describes; it has encoded an image.

    Raises `RuntimeError` if it cannot encode one, `ValueError` for a model that takes none, and TensorRT-LLM's errors.
    """
    files = model_files.read_files(model_folder(boot))
    layout = vision_layout(files)
    if layout is None or layout.image_token is None:
        raise ValueError("the model has no vision tower, or one of an unsupported family")
    dtype = str(boot.arguments.get("dtype", AUTO))
    media = media_info(files, layout.image_token, layout.merge, MediaForm.EMBEDDINGS, dtype)
    tower = TrtllmTower(names.start_encoder(boot.arguments), names, media)
    item = smallest_item(layout)
    (outcome,) = tower.encode([item], lambda: True)
    if outcome.code:
        raise RuntimeError(f"it cannot encode an image: {outcome.detail}")
    made, wanted = (outcome.data.shape, outcome.data.dtype), ((item.tokens, media.width), media.dtype)
    if made != wanted:
        raise RuntimeError(f"it makes embeddings of {made}, where the model has {wanted}")
    return tower


def run(boot: TrtllmBoot, link: socket.socket, watchdog: Watchdog) -> NoReturn:
    """Encode for the model that `boot` describes and serve `link`, until the node or the watchdog ends it."""
    tempfile.tempdir = os.environ["TMPDIR"] = boot.folder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the node to handle
    try:
        library.require()
        names = Library()
        tower = make_tower(boot, names)
        digest = model_files.model_digest(model_folder(boot))
        info = encoder_info("trtllm", names.version, tower.media, boot.batch_max, digest)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # any error is the reason of the failed start
        if not isinstance(error, ModuleNotFoundError):
            traceback.print_exception(error, file=sys.stderr)
        fail_start(boot.name, link, watchdog, error, "the encoder could not start")
    leftover_memory.record(Path(boot.folder), leftover_memory.mapped())
    host = EncoderHost(tower, info, Peer(boot.name, serves_max=STREAMS_MAX), link, watchdog)
    print_reason(asyncio.run(host.serve()))
    watchdog.unwatch_children()
    tower.encoder.shutdown()
    leftover_memory.remove(Path(boot.folder))
    os._exit(0)
