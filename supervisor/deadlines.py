"""How long whoever asks a node waits for its answer: each for longer than whom it asks may take.

Constants, because they follow from each other: a reload reads three things one after the other, may come behind another
one that runs, and its answer may come by way of two other nodes.
"""

from __future__ import annotations

FILE_READ_TIMEOUT_S = 5.0  # for a file and what it names
RELOAD_MAX_S = 3 * FILE_READ_TIMEOUT_S + 1.0  # at most: the file, then the keys, then the certificate
RELOAD_QUEUED_MAX_S = 2 * RELOAD_MAX_S  # behind one that had begun before; all who come meanwhile share the next
HOP_MARGIN_S = 0.5  # who passes a question on gives up so long before whoever has asked it, and says what is wrong
HOPS_MAX = 2  # to a node that routes, and from there to the one that is asked
WAY_S = (HOPS_MAX + 1) * HOP_MARGIN_S

ANSWER_TIMEOUT_S = 5.0  # to anything but a reload
RELOAD_ANSWER_TIMEOUT_S = RELOAD_QUEUED_MAX_S + WAY_S
INDIRECT_TIMEOUT_S = 3 * ANSWER_TIMEOUT_S  # for all nodes together that are looked at through others
