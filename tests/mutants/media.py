"""More bugs to plant: in the way of images and videos, by which an answer could be about another picture."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "actors/vision/placeholders.py": (
        Bug(
            "the items of a prompt stand in the opposite order",
            "counts = [item.tokens for item in items if item.modality is modality]",
            "counts = [item.tokens for item in reversed(items) if item.modality is modality]",
        ),
        Bug("a prompt may have places without items", "if places != len(counts):", "if places < len(counts):"),
    ),
    "actors/vision/layout.py": (
        Bug(
            "a large image keeps its height",
            "rows = max(factor, floor(height / scale / factor) * factor)",
            "rows = max(factor, floor(height / factor) * factor)",
        ),
        Bug(
            "an image of low detail is resized by the engine, which knows nothing of it",
            "return self._fit(low, 1, low)",
            "return self._fit(low, 1, (height, width))",
        ),
        Bug(
            "a narrow image is decoded to a size that the engine changes again",
            "        if self._becomes(own, own):\n            return own\n        best",
            "        return own\n        best",
        ),
        Bug(
            "rounding makes an image of low detail smaller than the engine leaves it",
            "low = resize(min(rows, longest), min(columns, longest), self.factor, limits)",
            "low = rows, columns",
        ),
        Bug(
            "the last frame of a video is left out",
            "{*(int(place * step) for place in range(count - 1)), frames - 1}",
            "{*(int(place * step) for place in range(count - 1))}",
        ),
    ),
    "actors/vision/model_files.py": (
        Bug(
            "other settings of a processor are the same settings",
            "json.dumps([image, video], sort_keys=True)",
            "json.dumps([])",
        ),
    ),
    "actors/vision/preparation.py": (
        Bug(
            "what the encoder returned is not compared",
            "if (one.tokens, one.grid, one.digest) !=",
            "if (item.tokens, item.grid, item.digest) !=",
        ),
        Bug(
            "embeddings of a client may be of any width",
            "item.form is MediaForm.EMBEDDINGS and (mistake :=",
            "item.form is MediaForm.PLACES and (mistake :=",
        ),
    ),
    "actors/text/prompts.py": (
        Bug(
            "turns that are left out leave their images",
            "items_left = items[:begin] + items[begin + first :]",
            "items_left = items",
        ),
    ),
    "actors/processor.py": (
        Bug(
            "pixels are held until the answer is whole",
            "            return await _encode(request, prompts[0], generations, seeing.encode, info)\n",
            "            held.push_async_exit(lease.pop_all())\n"
            "            return await _encode(request, prompts[0], generations, seeing.encode, info)\n",
        ),
        Bug(
            "an engine that takes embeddings gets pixels",
            "if takes_embeddings(info):",
            "if False:",
        ),
        Bug(
            "embeddings are counted in no budget",
            "            await held.enter_async_context(embedding_memory(size, request, seeing))\n",
            "",
        ),
    ),
    "actors/routing/encoding.py": (
        Bug("an item that was in a lost batch is in a batch again", "alone=self._crashes > 0", "alone=False"),
        Bug("an item may crash one encoder after the other", "or self._crashes > limits.crashes_max:", "or False:"),
        Bug("equal items go to different encoders", 'f"{digest} {name}".encode()', 'f"{name}".encode()'),
        Bug(
            "an encoder that was lost is asked again at once",
            "await self._wait(lost, self._pause_s) or",
            "await self._wait((), self._pause_s) or",
        ),
    ),
    "actors/routing/routed_request.py": (
        Bug("a decode gets the embeddings as well", "evolve(request, media=placed(request.media))", "request"),
    ),
    "protocol/media.py": (
        Bug("different images share a prefix", "pads = (-1 - (bits ^ row) for", "pads = (-1 - row for"),
        Bug(
            "the tensors of a request are those of its items in another order",
            "zip(items, _exactly(len(items), tensors), strict=True)",
            "zip(items, reversed(_exactly(len(items), tensors)), strict=True)",
        ),
    ),
    "protocol/codec.py": (
        Bug("bytes without a tensor are dropped", "if offset != len(data) or any", "if offset > len(data) or any"),
    ),
}
