"""A trial of the sandbox: one small image, decoded by a process like that of a job.

The C library of a machine may need a system call that the filter refuses. Better no job begins than that each fails.
"""

from __future__ import annotations

import os
from base64 import b64decode

from actors.media.decoder import content, images, job, sandbox
from actors.media.decoder.sniffing import ContentKind
from actors.media.jobs import Bounds, JobLimits

MIB = 1024 * 1024
LIMITS = JobLimits(cpu_s=10, memory_bytes=256 * MIB, output_bytes=MIB)
PNG = b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)  # one pixel


def passes(base_bytes: int, *, filtered: bool) -> bool:
    """Return whether a process can decode an image in the sandbox, with the filter or without."""
    source = job.write_sealed([PNG])
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            sandbox.keep_descriptors((source,))
            sandbox.enter(LIMITS, base_bytes, filtered=filtered)
            data = content.read(source)
            images.inspect(data, ContentKind.PNG, Bounds(pixels_max=4, aspect_max=1.0, frames_max=1, seconds_max=1.0))
            pixels = images.decode(data, ContentKind.PNG, 1, 1)
            status = int(os.lseek(job.write_sealed([pixels]), 0, os.SEEK_END) != len(pixels))
        finally:
            os._exit(status)
    os.close(source)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
