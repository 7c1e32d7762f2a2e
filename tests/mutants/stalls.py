"""Planted bugs in how links and nodes handle a peer that stands still."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "supervisor/links/heartbeat.py": (
        Bug(
            "a process that stands still is lost as if its host were gone",
            "acknowledged_s is None or acknowledged_s > limits.heartbeat_s",
            "acknowledged_s is None or acknowledged_s >= 0",
        ),
        Bug("a host that is gone counts as one that stands still", "acknowledged_s > limits.heartbeat_s", "False"),
        Bug(
            "a process that stands still is kept for ever",
            """        if self.allowed_s >= limits.stalled_s:
            return f"the other end has stood still for {self.allowed_s:g} s"
        self.allowed_s = min(self.allowed_s + limits.heartbeat_s, limits.stalled_s)
""",
            "        self.allowed_s += limits.heartbeat_s\n",
        ),
        Bug("a process that stood still is never used again", "            self.stalled = False\n", ""),
        Bug(
            "an end that stood still takes that for silence of others",
            " - self.allowed_s + limits.heartbeat_s",
            " - self.allowed_s",
        ),
    ),
    "supervisor/links/asking.py": (
        Bug(
            "requests to a process that stands still wait for it",
            "        self.fail_all(partial(self.lost_error, detail))\n",
            "",
        ),
    ),
    "supervisor/cluster/node_records.py": (
        Bug("a node that stands still is chosen", "link.lost or link.stalled or", "link.lost or"),
    ),
    "supervisor/cluster/carried_links.py": (
        Bug(
            "queued requests do not go to a node that goes on again",
            "        self.directory.reroute_queued()  # it may serve",
            "        # it may serve",
        ),
    ),
    "supervisor/links/handshake_stream.py": (
        Bug(
            "bytes that are on their way for a moment count as a host that is gone",
            "return since_ms / 1000 if probes or unacknowledged else 0.0",
            "return since_ms / 1000",
        ),
    ),
}
