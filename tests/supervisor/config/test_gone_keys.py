"""What `--check` says of a key that `cluster.toml` had once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rig.gateway import FOLDER
from tests.supervisor.config.test_load import GOOD, mistakes

Written = Callable[[str], Path]
SERVED = '[engine.b]\nmodel = "other"\nkind = "simulated"\nkv_tokens_max = 64'


@pytest.mark.parametrize(
    ("added", "row"),
    [
        ("[cluster]\ntell_s = 0.5", "cluster.tell_s: is no longer a key: loads are announced every 0.1 s"),
        ("[gateway.text]\nthreads = 4", "gateway.text: is no longer a key: long texts are tokenised in 2 threads"),
        (
            "[gateway.limits]\nwebsocket_idle_s = 60",
            "gateway.limits.websocket_idle_s: is no longer a key: a WebSocket may be idle for 900 s",
        ),
        ("ladder.kill_s = 0", "engine.tiny-0.ladder: is no longer a key: an engine's process has 5 s to end"),
        (
            '[engine."b.1"]\nmodel = "tiny"\ndevice = "cpu"\nkv_tokens_max = 64\ndeadlines.leak_s = 3',
            'engine["b.1"].deadlines.leak_s: is no longer a key: an engine is restarted once a slot',
        ),
        (
            f'[model.other]\npath = "{FOLDER}"\nmoves_max = 1\n{SERVED}',
            "model.other.moves_max: is no longer a key: a request that waits 2 s",
        ),
    ],
    ids=["a key", "a table", "a key of the limits", "a table of an engine", "a quoted name", "a key of a model"],
)
def test_a_key_that_is_gone_is_a_mistake_that_says_what_became_of_it(written: Written, added: str, row: str) -> None:
    ((_, mistake),) = mistakes(written(f"{GOOD}{added}\n"))
    assert mistake.startswith(row)


def test_a_key_that_is_gone_hides_no_other_mistake(written: Written) -> None:
    found = [mistake for _, mistake in mistakes(written(f"{GOOD}[cluster]\ntell_s = 1\nstalled_s = 2\n"))]
    assert [mistake.partition(":")[0] for mistake in found] == ["cluster.tell_s", "cluster.stalled_s"]
