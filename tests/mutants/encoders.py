"""Bugs by which an image would be encoded twice or never, kept too long, or answered about another one."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "actors/encoder.py": (
        Bug(
            "a slot is free while the engine still encodes",
            "if encoding is not None and encoding.begun.is_set():",
            "if False:",
        ),
        Bug(
            "a slot waits for an item that others want",
            "if encoding is not None and encoding.begun.is_set():",
            "if encoding is not None:",
        ),
        Bug("a crash is not blamed on what was in the batch", "    encodings.fail_batch(", "    str("),
        Bug("pixels of any size are encoded", "if fit.grid != item.grid or (is_image and frames != 1):", "if False:"),
    ),
    "actors/engines/encodings.py": (
        Bug(
            "the first who leaves ends an item for all",
            "if not encoding.askers and not encoding.over.is_set():",
            "if not encoding.over.is_set():",
        ),
        Bug(
            "one item that nobody wants ends its whole batch",
            "elif not batch.answered and not any(each.askers for each in batch.encodings):",
            "elif not batch.answered:",
        ),
        Bug("a batch that nobody wants goes on", "            self.engine.abort(batch.id)\n\n", "\n\n"),
        Bug("an aborted item can be joined", "self._forget(each)  # no result will come", "pass"),
        Bug("embeddings keep the memory of their batch", "data=memoryview(copied).toreadonly()", "data=view"),
        Bug("what was kept answers for any item", "        _check_equal(item, kept)\n", ""),
        Bug(
            "an item waits for the turn of its first asker",
            "        if encoding.batch is None:\n            self._queue",
            "        if encoding.batch is None and not encoding.places:\n            self._queue",
        ),
        Bug(
            "each new item prolongs the wait for others",
            "if (due_at := first.asked_at +",
            "if (due_at := list(self._waiting.values())[-1].asked_at +",
        ),
        Bug(
            "others come along with one that shall be alone", "(encoding.alone or encodings[0].alone)", "encoding.alone"
        ),
        Bug("a batch has any number of bytes", " or size > BATCH_BYTES_MAX)", ")"),
        Bug(
            "an engine may keep a batch for ever",
            "        if waiting.cancelled_caught:\n            raise",
            "        if False:\n            raise",
        ),
        Bug("embeddings of another shape are passed on", "if tensor.shape != (item.tokens, media.width):", "if False:"),
        Bug(
            "an item that failed fails its batch",
            "                self._end(encoding, error)\n                continue",
            "                raise",
        ),
    ),
    "actors/engines/embedding_cache.py": (
        Bug("the oldest embeddings go first, however often they are used", "self._items.move_to_end(digest)", "pass"),
        Bug(
            "the cache never shrinks", "while self._items and self.kept_bytes + size > self.bytes_max:", "while False:"
        ),
    ),
    "actors/engines/media_check.py": (
        Bug(
            "more placeholders than embeddings are accepted",
            "            if count != needed:",
            "            if count < needed:",
        ),
        Bug("a decode gets embeddings", "if item.form is not info.media_form:", "if item.form is not media.form:"),
        Bug(
            "a grid may make any number of tokens",
            "if item.tokens < 1 or tokens != item.tokens:",
            "if item.tokens < 1:",
        ),
    ),
    "actors/engines/simulated/held_request.py": (
        Bug("images behind one text share a prefix", "if items else tokens", "if False else tokens"),
    ),
    "protocol/cluster.py": (
        Bug("a whole engine stands in for an encoder", "{Leg.BOTH, Leg.ENCODE} else", "{Leg.BOTH} else"),
    ),
    "supervisor/cluster/announcements.py": (
        Bug("an older node is offered an encoder", "(state.takes_encoders or worker.leg is not Leg.ENCODE) and ", ""),
    ),
    "supervisor/cluster/models.py": (
        Bug("an encoder limits prompts", "is not None and offer.leg is not Leg.ENCODE]", "is not None]"),
    ),
    "supervisor/engines/children.py": (
        Bug("embeddings outlive the engine that made them", "        cache.clear()  #", "        #"),
    ),
}
