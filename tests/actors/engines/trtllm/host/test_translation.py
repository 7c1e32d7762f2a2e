"""The info of an engine, by its boot message and its version."""

from __future__ import annotations

import pytest
from attrs import evolve

from actors.engines.trtllm import boot_message
from actors.engines.trtllm.host.translation import engine_info
from actors.engines.trtllm.spec import TrtllmSpec
from bench.rig.node import MODEL, ROOT
from protocol.errors import Unsupported

SPEC = TrtllmSpec("e", str(ROOT / "examples" / MODEL), slots=8, kv_tokens_max=4096, tensor_parallel=2)


def test_an_engine_has_the_ranks_of_its_boot_message_if_its_version_can_name_one() -> None:
    boot = boot_message.build(evolve(SPEC, data_parallel=2), "/run/e")
    assert engine_info(boot, "1.2", (), "p").data_parallel == 2
    with pytest.raises(Unsupported, match=r"1\.0 cannot be given a rank"):
        engine_info(boot, "1.0", (), "p")
    assert engine_info(boot_message.build(SPEC, "/run/e"), "1.0", (), "p").data_parallel == 1
