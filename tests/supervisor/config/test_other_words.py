"""A word of another server, or of another section, is a mistake that names the key that is meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from actors.engines.sglang.arguments import TYPES
from actors.engines.sglang.setting_rules import REFUSED
from supervisor.config import other_words
from tests.repository.test_configuration_page import tables
from tests.supervisor.config.test_load import GOOD, mistakes

Written = Callable[[str], Path]


@pytest.mark.parametrize(
    ("added", "row"),
    [
        ("max_model_len = 3", "engine.tiny-0.max_model_len: is not a key here; did you mean context_max?"),
        ('"--max-model-len" = 3', "engine.tiny-0.--max-model-len: is not a key here; did you mean context_max?"),
        ("tp = 2", "engine.tiny-0.tp: is not a key here; did you mean tensor_parallel?"),
        (
            "gpu_memory_utilization = 0.9",
            "engine.tiny-0.gpu_memory_utilization: is not a key here; did you mean memory_fra",
        ),
        (
            'dtype = "half"',
            "engine.tiny-0.dtype: is not a key here; it is an argument of SGLang: write it in [engine.NAME",
        ),
        ("first_token_s = 3", "engine.tiny-0.first_token_s: is not a key here; it is a key of [engine.NAME.deadlines]"),
        ("port = 3", "engine.tiny-0.port: is not a key here; did you mean port of [gateway]?"),
        (
            "warmups = 3",
            "engine.tiny-0.warmups: is not a key here; what SGLang has by this name cannot be set: it is for",
        ),
        ("temperature = 3", "engine.tiny-0.temperature: is not a key here; sampling parameters are in each request"),
        (
            "settings.max_model_len = 3",
            "engine.tiny-0.settings.max_model_len: is no argument of SGLang; did you mean con",
        ),
        ("settings.tp_size = 3", "engine.tiny-0.settings.tp_size: is given by tensor_parallel"),
        ("[gateway]\nmax_requests = 3", "gateway.max_requests: is not a key here; did you mean requests_max?"),
        ('[gateway]\ntls_cert = "a"', "gateway.tls_cert: is not a key here; did you mean tls_certificate?"),
        ('[cluster]\ntls_cert = "a"', "cluster.tls_cert: is not a key here; did you mean tls_certificate?"),
        ('[gateway]\napi_key = "a"', "gateway.api_key: is not a key here; did you mean keys? It is a file"),
        ("[gateway]\nslots = 3", "gateway.slots: is not a key here; it is a key of [engine.NAME]"),
        ("[server]\nport = 3", "server: is not a key here; did you mean gateway?"),
        ("[node.main]\nport = 3", "node.main.port: is not a key here; did you mean listen? It is an address"),
    ],
)
def test_a_word_of_another_server_or_section_is_a_mistake_with_the_key_that_is_meant(
    written: Written, added: str, row: str
) -> None:
    ((_, mistake),) = mistakes(written(f"{GOOD}{added}\n"))
    assert mistake.startswith(row)


@pytest.mark.parametrize(
    ("text", "row"),
    [
        (GOOD.replace("path", "model_path"), "model.tiny.model_path: is not a key here; did you mean path?"),
        (
            GOOD.replace("kv_tokens_max", "max_total_tokens"),
            "engine.tiny-0.max_total_tokens: is not a key here; did you",
        ),
        (
            f'served_model_name = "x"\n{GOOD}',
            "served_model_name: is not a key here; the name of a model for clients is",
        ),
    ],
)
def test_a_key_under_another_word_is_not_missing_as_well(written: Written, text: str, row: str) -> None:
    ((_, mistake),) = mistakes(written(text))
    assert mistake.startswith(row)


def test_every_key_of_the_table_is_one() -> None:
    sections = [(heading.split("`")[1].strip("[]"), keys) for heading, _, keys in tables()]
    known = {section for section, _ in sections} | {f"{section}.{key}" for section, keys in sections for key in keys}
    known |= {f"engine.NAME.settings.{name}" for name in TYPES.keys() - REFUSED.keys()}
    known |= {section.partition(".")[0] for section, _ in sections}
    assert {*other_words.keys()} <= known
