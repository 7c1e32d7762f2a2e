"""Bugs of the processes in which SGLang computes with images, and encodes them."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "actors/engines/sglang/host/media_input.py": (
        Bug("a scheduler takes all images for one", "        made.set_identity(bytes.fromhex(item.digest))\n", ""),
        Bug(
            "items are given in the order of their modalities",
            "order = sorted(range(len(places)), key=lambda number: places[number].start)",
            "order = range(len(places))",
        ),
        Bug(
            "tokens of placeholders in an answer are taken for an image",
            "outline = [next(token for token in range(len(special) + 1) if token not in special)] * len(tokens)",
            "outline = list(tokens)",
        ),
        Bug(
            "a place is one token too long",
            "offsets=[(place.start, place.stop - 1)]",
            "offsets=[(place.start, place.stop)]",
        ),
        Bug(
            "the tensors of a caller that has left stay in shared memory",
            "            made.add_done_callback(self._drop)\n",
            "",
        ),
        Bug(
            "embeddings that are no numbers reach the engine",
            "self.shared.share(_finite(item))",
            "self.shared.share(as_torch(item.data))",
        ),
        Bug("a video without times has those of another", "if len(known) < len(videos):", "if False:"),
    ),
    "actors/engines/sglang/host/pixels.py": (
        Bug("pixels of another size are encoded", "        self._check_size(item)\n", ""),
        Bug(
            "memory is unmapped under a computation",
            "    array = np.frombuffer(tensor.data, np.uint8)\n    return torch.from_numpy(array).view(",
            "    return torch.frombuffer(tensor.data, dtype=torch.uint8).view(",
        ),
        Bug("the tower gets patches of another type", "return patches.to(self.dtype)", "return patches"),
    ),
    "actors/engines/sglang/host/vision_tower.py": (
        Bug("an item that fails takes its batch along", "            if len(inputs) > 1:\n", "            if False:\n"),
        Bug("embeddings that are no numbers are an answer", "if not bool(torch.isfinite(rows).all()):", "if False:"),
        Bug(
            "outcomes are in another order than items",
            "return [by_place[place] for place in range(len(items))]",
            "return list(by_place.values())",
        ),
    ),
    "actors/engines/sglang/host/liveness.py": (
        Bug("what computes for long does not live", "if running and self._suffices(", "if False and self._suffices("),
        Bug(
            "what stands still lives",
            "map(int.__lt__, computed, self._computed())",
            "map(int.__le__, computed, self._computed())",
        ),
    ),
    "actors/engines/sglang/host/encoder.py": (
        Bug("a batch that nobody wants is computed to its end", "return not self.left", "return True"),
        Bug(
            "a batch that waits is computed for nobody",
            "            self._waiting.remove(batch)\n",
            "",
        ),
        Bug("any number of batches waits", " >= BATCHES_MAX:", " >= 10**9:"),
        Bug("a batch of any size is computed", "if not 1 <= len(batch.items) <= self.info.running_max:", "if False:"),
        Bug(
            "an encoder that fails all items goes on",
            "                self.served.note_failure(outcome.detail)\n",
            "                pass\n",
        ),
    ),
}
