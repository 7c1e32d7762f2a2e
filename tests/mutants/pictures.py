"""More bugs to plant: those of images and videos that show only where requests, faults and other clients come together."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "actors/engines/encodings.py": (
        Bug(
            "embeddings are kept as those of another item of their batch",
            "            self.cache.put(embedded)\n",
            "            self.cache.put(evolve(embedded, digest=batch.encodings[0].item.digest))\n",
        ),
        Bug(
            "whoever leaves takes a picture from all who wait for it",
            "            if not encoding.askers and not encoding.over.is_set():\n",
            "            if not encoding.over.is_set():\n",
        ),
        Bug(
            "a picture whose batch was aborted is waited for",
            "            for each in batch.encodings:\n                self._forget(each)  # no result will come\n",
            "",
        ),
        Bug(
            "an encoder may return other rows than a picture has",
            "        _check_embeddings(item, outcome.data, self.media)\n",
            "",
        ),
    ),
    "actors/encoder.py": (
        Bug(
            "a picture that was encoded before keeps its slot",
            "        free.release()\n",
            "        if encoding is not None:\n            free.release()\n",
        ),
    ),
    "actors/media.py": (
        Bug(
            "the first content of a request that fails is kept",
            "                for item in items:\n                    item.close()\n",
            "                for item in items[1:]:\n                    item.close()\n",
        ),
        Bug(
            "a decoded picture is kept when its request ends",
            "        lease.callback(self.ports.release, item.tensor)\n",
            "",
        ),
    ),
    "actors/vision/planning.py": (
        Bug(
            "a picture of low detail is that of high detail",
            r'f"{content}\n{modality.value}\n{settings}\n{processing}"',
            r'f"{content}\n{modality.value}\n{settings}"',
        ),
    ),
    "actors/routing/encoding.py": (
        Bug(
            "pictures stand in the order in which they were encoded",
            "            items[place] = await _Item(self, work, items[place]).embedded()\n",
            "            item = items[place]\n            embedded = await _Item(self, work, item).embedded()\n"
            "            items.remove(item)\n            items.append(embedded)\n",
        ),
        Bug(
            "a picture is not encoded elsewhere when the link to its encoder is lost",
            "FAILOVER = (ActorLost, Draining, EngineLost, LinkLost, NotReady, Overloaded)",
            "FAILOVER = (ActorLost, Draining, EngineLost, NotReady, Overloaded)",
        ),
    ),
    "actors/routing/routed_request.py": (
        Bug(
            "a request that goes on elsewhere leaves its pictures",
            "            tokens=[*self.request.tokens, *sent],\n",
            "            tokens=[*self.request.tokens, *sent],\n            media=(),\n",
        ),
    ),
}
