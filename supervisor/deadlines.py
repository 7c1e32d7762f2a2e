"""Time limits of control requests, in seconds: each caller waits for longer than whatever it calls may take.

Constants, because each follows from the one before it: a reload reads three things one after the other, may wait for
another one that runs, and its answer may come by way of two other nodes. Were one of them a setting, a caller could
give up before the callee, and report a timeout in place of the callee's error.
"""

from __future__ import annotations

FILE_READ_TIMEOUT_S = 5.0  # for a file and what it names
RELOAD_MAX_S = 3 * FILE_READ_TIMEOUT_S + 1.0  # at most: the file, then the keys, then the certificate
RELOAD_QUEUED_MAX_S = 2 * RELOAD_MAX_S  # behind one that runs; all requests that come meanwhile share the next
HOP_MARGIN_S = 0.5  # a node that forwards a request gives up so long before its caller, and reports the reason
HOPS_MAX = 2  # to a node that routes, and from there to the one that is asked
WAY_S = (HOPS_MAX + 1) * HOP_MARGIN_S

ANSWER_TIMEOUT_S = 5.0  # of anything but a reload
RELOAD_ANSWER_TIMEOUT_S = RELOAD_QUEUED_MAX_S + WAY_S
INDIRECT_TIMEOUT_S = 3 * ANSWER_TIMEOUT_S  # for all nodes together that are asked through others
