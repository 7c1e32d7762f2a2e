"""Bugs to plant where what clients send in very small pieces is read."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "supervisor/gateway/websocket/replayed_stream.py": (
        Bug("all clients' frames are read in one turn", "        if frames > FRAMES_FREE:\n", "        if False:\n"),
        Bug(
            "a client with few frames waits for clients with many",
            "        if frames > FRAMES_FREE:\n",
            "        if frames:\n",
        ),
    ),
    "supervisor/gateway/http/request_reader.py": (
        Bug(
            "all clients' chunks are read in one turn",
            "                        await self.gateway.wait_read_turn()\n",
            "                        await trio.lowlevel.checkpoint()\n",
        ),
        Bug(
            "the pipelined requests of all clients are read in one turn",
            "        if self._pipelined > PIPELINED_FREE:\n",
            "        if False:\n",
        ),
        Bug(
            "a pipelined request is answered in the turn of the one before it",
            "            await trio.lowlevel.checkpoint()\n",
            "            pass\n",
        ),
        Bug(
            "a client with few pipelined requests waits for clients with many",
            "        if self._pipelined > PIPELINED_FREE:\n",
            "        if self._pipelined:\n",
        ),
    ),
    "supervisor/gateway/http/exchange.py": (
        Bug("all received pieces of a refused body are read in one turn", "range(UNREAD_PIECES_MAX)", "range(2**31)"),
    ),
    "supervisor/gateway/websocket/frame_counter.py": (
        Bug("a frame's payload is read as frames", "            if self._left_bytes:\n", "            if False:\n"),
        Bug("a long frame's length is read as a short one's", "LONGER.get(self._head[1] & 0x7F, 0)", "0"),
        Bug("a ping ends a message", "if self._first_byte & OPCODE >= CONTROL:", "if False:"),
    ),
}
