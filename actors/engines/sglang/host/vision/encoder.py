"""The start of an encoder's host: SGLang's vision tower of one model in this process. asyncio stays in this folder."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
import traceback
from pathlib import Path
from typing import NoReturn

from setproctitle import setproctitle
from sglang.version import __version__

from actors.engines import leftover_memory, model_files
from actors.engines.host.encoder_host import STREAMS_MAX, EncoderHost
from actors.engines.host.failed_start import fail_start
from actors.engines.host.watchdog import Watchdog, print_reason
from actors.engines.sglang import boot_message
from actors.engines.sglang.host.vision.vision_tower import make_tower
from protocol.link.peer import Peer
from protocol.messages.engine import encoder_info


def run(boot: boot_message.BootMessage, link: socket.socket, watchdog: Watchdog) -> NoReturn:
    """Encode for the model that `boot` describes and serve `link`, until the node or the watchdog ends it."""
    assert boot.batch_max is not None
    folder = Path(boot.folder)
    setproctitle("espalier::encoder")
    tempfile.tempdir = os.environ["TMPDIR"] = boot.folder
    os.environ.update(boot.environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the node to handle
    try:
        tower = make_tower(boot.arguments, folder)
        digest = model_files.model_digest(Path(str(boot.arguments["model_path"])))
        info = encoder_info("sglang", __version__, tower.media, boot.batch_max, digest)
        leftover_memory.record(folder, leftover_memory.mapped())
    except (Exception, SystemExit) as error:  # noqa: BLE001  # any error is the reason of the failed start
        traceback.print_exc()
        fail_start(boot.name, link, watchdog, error, "the encoder could not start")
    host = EncoderHost(tower, info, Peer(boot.name, serves_max=STREAMS_MAX), link, watchdog)
    print_reason(asyncio.run(host.serve()))
    leftover_memory.remove(folder)
    os._exit(0)
