"""Time limits of control requests, in seconds: each caller waits for longer than the function that it calls may take.

Constants, because each follows from the one before it: a reload reads three things one after the other, may wait for
another one that runs, and its answer may come by way of two other nodes. Were one of them a setting, a caller could
give up before the callee, and report a timeout in place of the callee's error.
"""

from __future__ import annotations

FILE_READ_TIMEOUT_S = 5.0  # for a file and the files that it names
RELOAD_MAX_S = 3 * FILE_READ_TIMEOUT_S + 1.0  # at most: the file, then the keys, then the certificate
RELOAD_QUEUED_MAX_S = 2 * RELOAD_MAX_S  # behind one that runs; requests that come meanwhile share the next
HOP_MARGIN_S = 0.5  # by which a node that forwards a request gives up before its caller, to report why
HOPS_MAX = 2  # to a node that routes, and from there to the node that answers
WAY_S = (HOPS_MAX + 1) * HOP_MARGIN_S

ANSWER_TIMEOUT_S = 5.0  # of any request but a reload and a restart
RESTART_ANSWER_TIMEOUT_S = FILE_READ_TIMEOUT_S + 1.0 + WAY_S  # the file is read before the node drains
RELOAD_ANSWER_TIMEOUT_S = RELOAD_QUEUED_MAX_S + WAY_S
INDIRECT_TIMEOUT_S = 3 * ANSWER_TIMEOUT_S  # of all nodes that are asked through others, together
