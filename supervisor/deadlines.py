"""Time limits of control requests, in seconds: each caller waits for longer than its callee may take.

Constants, because each follows from the one before it: a reload reads three things one after the other, may wait for
another reload, and its answer may come by way of two other nodes. If one of them were a setting, a caller could time
out before its callee, and hide the callee's error.
"""

from __future__ import annotations

FILE_READ_TIMEOUT_S = 5.0  # a file with all files named in it
RELOAD_MAX_S = 3 * FILE_READ_TIMEOUT_S + 1.0  # the file, then the keys, then the certificate
RELOAD_QUEUED_MAX_S = 2 * RELOAD_MAX_S  # behind a running reload; later requests share the next one
HOP_MARGIN_S = 0.5  # a forwarding node times out this much before its caller, to report the cause
HOPS_MAX = 2  # by way of a routing node
WAY_S = (HOPS_MAX + 1) * HOP_MARGIN_S

ANSWER_TIMEOUT_S = 5.0  # all requests but a reload and a restart
RESTART_ANSWER_TIMEOUT_S = FILE_READ_TIMEOUT_S + 1.0 + WAY_S  # the file is read before the node drains
RELOAD_ANSWER_TIMEOUT_S = RELOAD_QUEUED_MAX_S + WAY_S
INDIRECT_TIMEOUT_S = 3 * ANSWER_TIMEOUT_S  # all nodes asked through others, together
