"""Bugs to plant where what clients send in very small pieces is read."""

from __future__ import annotations

from tests.planted import Bug, Bugs

PIECES: Bugs = {
    "supervisor/doors/websocket.py": (
        Bug("all clients' frames are read in one turn", "        if frames > FRAMES_FREE:\n", "        if False:\n"),
        Bug(
            "whoever sends few frames waits for those who send many",
            "        if frames > FRAMES_FREE:\n",
            "        if frames:\n",
        ),
    ),
    "supervisor/doors/http.py": (
        Bug(
            "all clients' chunks are read in one turn",
            "await self.door.wait_turn()",
            "await trio.lowlevel.checkpoint()",
        ),
    ),
    "supervisor/doors/frame_heads.py": (
        Bug("a frame's payload is read as frames", "            if self._left_bytes:\n", "            if False:\n"),
        Bug("a long frame's length is read as a short one's", "LONGER.get(self._head[1] & 0x7F, 0)", "0"),
        Bug("a ping ends a message", "if self._first & OPCODE >= CONTROL:", "if False:"),
    ),
}
