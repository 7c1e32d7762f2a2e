"""SGLang's own engine, fed with the URLs of pictures and videos as its own server feeds it: what our engines are compared with.

`python -m tests.rig.sglang_alone` reads cases from its input, and writes the tokens of their greedy answers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from attrs import asdict, frozen

from supervisor.engines.host.spawn import ROOT
from supervisor.engines.sglang.spawn import host_environment

ANSWERED_WITHIN_S = 400.0


@frozen
class Case:
    """A prompt with one placeholder for each picture and video, in their order, and their data URLs."""

    text: str
    images: tuple[str, ...] = ()
    videos: tuple[str, ...] = ()


def answers(model: Path, cases: Sequence[Case], tokens: int) -> list[list[int]]:
    """Return the tokens of greedy answers of so many tokens, from an engine in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.rig.sglang_alone"],
        env={**host_environment(os.environ, "cpu"), "TMPDIR": "/tmp"},
        cwd=ROOT,
        input=json.dumps({"model": str(model), "tokens": tokens, "cases": [asdict(case) for case in cases]}),
        capture_output=True,
        text=True,
        timeout=ANSWERED_WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    import espalier_sglang_cpu

    espalier_sglang_cpu.prepare()
    import multiprocessing

    import sglang
    import sglang.srt.models.registry  # before the scheduler is forked, which would import it again
    from sglang.srt.managers.load_snapshot import shm_path_for
    from sglang.srt.server_args import PortArgs

    from actors.engines.sglang.boot_message import CPU_ARGUMENTS, DEFAULT_ARGUMENTS
    from actors.engines.sglang.host.vision import towers

    towers.encode_items_alone()  # else the last bits of an image's embeddings depend on the others of its prompt
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None
    asked = json.load(sys.stdin)
    arguments = {**DEFAULT_ARGUMENTS, **CPU_ARGUMENTS, "model_path": asked["model"]}
    load_files = []
    init_new = PortArgs.init_new

    def noted(*arguments: object, **named: object) -> object:
        ports = init_new(*arguments, **named)
        load_files.append(Path(shm_path_for(ports.instance_id)))
        return ports

    PortArgs.init_new = staticmethod(noted)
    engine = sglang.Engine(**arguments, max_total_tokens=16384, max_running_requests=4, page_size=16)
    sampling = {"max_new_tokens": asked["tokens"], "temperature": 0, "ignore_eos": True}
    given = []
    for case in asked["cases"]:
        media = {"image_data": case["images"] or None, "video_data": case["videos"] or None}
        given.append(engine.generate(prompt=case["text"], sampling_params=sampling, **media)["output_ids"])
    sys.stdout.write(json.dumps(given) + "\n")
    sys.stdout.flush()
    engine.shutdown()
    for path in load_files:
        path.unlink(missing_ok=True)  # which SGLang leaves


if __name__ == "__main__":
    main()
