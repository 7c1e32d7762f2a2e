"""Whether this machine has the filter of system calls around decoders, as far as the kernel says without a process.

The template of the decoders tries the filter itself, with an image, whenever it starts.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform

from actors.media.jobs import FILTERED_MACHINES
from supervisor.config.load import Misconfigured
from supervisor.config.media import MediaSection
from supervisor.media.template import WITHOUT_FILTER

KEY = "gateway.media.sandbox"
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2


def check_filter(section: MediaSection) -> None:
    """Raise `Misconfigured` if decoders must have a filter that this machine lacks."""
    if section.sandbox == "required" and (why := missing()) is not None:
        raise Misconfigured(KEY, f'is "required", and {why}: {WITHOUT_FILTER}')


def missing() -> str | None:
    """Return why no process of this machine can have the filter, None if it can."""
    if platform.machine() not in FILTERED_MACHINES:
        return f"there is no filter of system calls for {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    # A kernel that has filters reads the program first, and this one has no address.
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, None, 0, 0) == 0 or ctypes.get_errno() == errno.EFAULT:
        return None
    return f"this kernel lets no process filter its system calls ({os.strerror(ctypes.get_errno())})"
