"""The words with which the host of an engine reports its end to its node."""

from __future__ import annotations

START_FAILED = "start_failed"
"""The code of the Bye of a host whose engine could not start."""

HOST_ENDS = "host ends: "
"""The words before the reason that a host writes into its log."""

KILLED = "killed by"
"""The words before the signal that ended a process of an engine, in the last line of its host's log."""
