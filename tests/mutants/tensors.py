"""Bugs of tensors in shared memory, and of those that wait for room on a link."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "actors/engines/shared_tensors.py": (
        Bug("a file is mapped that may still change", "& SEALS != SEALS:", "& 0:"),
        Bug("a region is known by its name alone", " or status.st_ino != place.inode:", ":"),
        Bug("a region is mapped beyond its end", "if end > status.st_size:", "if False:"),
        Bug(
            "one wrong region leaves the others open",
            "            os.close(mapping.descriptor)\n        raise\n",
            "            pass\n        raise\n",
        ),
        Bug("a region is passed on that nobody can open", " or mapping.descriptor < 0:", ":"),
    ),
    "actors/engines/sglang/host/link_messages.py": (
        Bug("a host shares results with whoever has left", '.state(stream) == "leaving":', '.state(stream) == "":'),
        Bug(
            "a host keeps the memory of a request that has ended",
            "                tensor.data.release()\n",
            "                pass\n",
        ),
        Bug("a result that nobody takes is kept for ever", "self.call_later(self.lease_s, self.taken, stream)", "pass"),
    ),
    "supervisor/tensors/shared_memory.py": (
        Bug(
            "an unmapped region keeps its descriptor",
            "        self._close(descriptor, size)\n\n    def _close(",
            "\n    def _close(",
        ),
        Bug(
            "what was shared counts for ever",
            "        finally:\n            share.give_back()\n",
            "        finally:\n            pass\n",
        ),
    ),
    "supervisor/tensors/shared_road.py": (
        Bug("a host may share the memory of other processes", "place.process != self.process for", "False for"),
    ),
    "supervisor/links/carried_request.py": (
        Bug(
            "an engine that never comes holds its region as long as its call",
            "            await self.answer.over.wait()\n        if self.expire is not None:\n            self.expire()\n",
            "            await self.answer.over.wait()\n",
        ),
    ),
    "supervisor/links/asking.py": (
        Bug("no host learns that its result was taken", "if rules.shared:  #", "if False:  #"),
        Bug(
            "a request whose asker has left goes on being carried",
            '            carried.leave(AskerLeft("the asker left"))\n',
            "",
        ),
        Bug(
            "a request that waits for room takes no stream",
            "len(self.peer.asked) + self._unsent + self._woken <",
            "len(self.peer.asked) + self._woken <",
        ),
    ),
    "protocol/codec.py": (
        Bug(
            "another node may describe memory of this machine",
            "if not shared or tensor.shared.size",
            "if tensor.shared.size",
        ),
    ),
}
