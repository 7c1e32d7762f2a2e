"""The requests inside an embedder, which are parts of clients' requests: their items, their rows, and their ends.

An item is a request of the scheduler's own. The id of each begins with the number of its part, which has a fixed
length. SGLang aborts all items with such a beginning, so one message aborts a part. A part is over once the
scheduler has reported each of its items, computed or dropped: until then one may hold KV memory.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import numpy as np
from attrs import define
from sglang.srt.managers.io_struct import AbortReq, BatchTokenizedEmbeddingReqInput, TokenizedEmbeddingReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from actors.engines.sglang.host import translation
from actors.engines.sglang.host.vectors import Rows, VectorStep
from protocol.errors import AskerLeft, RequestError
from protocol.messages.embedding import Embed, TextItem
from protocol.messages.engine import EngineInfo

NUMBER_LENGTH = 12
"""The characters of a part's number, at the beginning of the ids of its items."""


@define(eq=False)
class EmbedPart:
    """One request inside the engine; `left` counts the items that the scheduler has not reported."""

    stream: int
    request: Embed
    prefix: str
    left: int
    rows: Rows | None = None
    error: RequestError | None = None  # by which it fails once all of its items are released


class Parts:
    """The requests that run, by their numbers and by their streams; `dispatch` sends to the scheduler in order."""

    def __init__(self, dispatch: Callable[[object], None], info: EngineInfo, *, has_types: bool) -> None:
        self._dispatch = dispatch
        self._info = info
        self._has_types = has_types
        self._numbers = count(1)
        self._nothing = SamplingParams(max_new_tokens=0)
        self._nothing.normalize(None)
        self.by_prefix: dict[str, EmbedPart] = {}
        self.by_stream: dict[int, EmbedPart] = {}

    def start(self, stream: int, request: Embed) -> None:
        """Send the items of a request to the scheduler; raises `BadRequest` for a token outside the vocabulary."""
        prefix = f"{next(self._numbers):0{NUMBER_LENGTH}x}"
        items = [self._item(f"{prefix}.{index}", item, request) for index, item in enumerate(request.items)]
        self.by_prefix[prefix] = self.by_stream[stream] = EmbedPart(stream, request, prefix, len(items))
        self._dispatch(BatchTokenizedEmbeddingReqInput(batch=items))

    def _item(self, rid: str, item: TextItem, request: Embed) -> TokenizedEmbeddingReqInput:
        length = len(item.tokens)
        return TokenizedEmbeddingReqInput(
            rid=rid,
            input_text=None,
            input_ids=translation.input_ids(item.tokens, self._info),
            mm_inputs=None,
            # SGLang puts those of a step one behind the other, so each item has some or none has.
            token_type_ids=[0] * item.second_at + [1] * (length - item.second_at) if self._has_types else None,
            sampling_params=self._nothing,
            priority=request.priority,
        )

    def abort(self, part: EmbedPart, error: RequestError) -> None:
        """Drop the items of a request that the scheduler has not reported; the first error is the request's."""
        if part.error is None:
            part.error = error
            self._dispatch(AbortReq(rid=f"{part.prefix}."))

    def cancel(self, stream: int) -> bool:
        """Abort the request of a stream; return whether there is one."""
        if (part := self.by_stream.get(stream)) is None:
            return False
        self.abort(part, AskerLeft("the asker left"))
        return True

    def step(self, step: VectorStep) -> list[EmbedPart]:
        """Take the items of a step, computed or dropped, and return the requests that are over."""
        over: list[EmbedPart] = []
        if step.ids:
            matrix = step.matrix
            for row, rid in zip(matrix, step.ids, strict=True):
                prefix, _, index = rid.partition(".")
                part = self.by_prefix[prefix]
                if part.rows is None:
                    part.rows = np.empty((len(part.request.items), matrix.shape[1]), "<f4")
                part.rows[int(index)] = row
                self._count(part, over)
        for rid, reason in step.failed.items():
            part = self.by_prefix[rid[:NUMBER_LENGTH]]
            self.abort(part, translation.abort_error(reason))
            self._count(part, over)
        return over

    def _count(self, part: EmbedPart, over: list[EmbedPart]) -> None:
        part.left -= 1
        if not part.left:
            del self.by_prefix[part.prefix], self.by_stream[part.stream]
            over.append(part)
