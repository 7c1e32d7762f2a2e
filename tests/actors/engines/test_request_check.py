"""What a diffusion model would ignore is refused by the name of its field, and what it honours is not."""

from __future__ import annotations

from typing import Any

import pytest

from actors.engines.request_check import check_request
from protocol.errors import Unsupported
from protocol.messages.engine import EngineInfo
from protocol.messages.generation import Generate, Sampling
from protocol.token_ids import TokenIds

DIFFUSION = EngineInfo("any", "1", 100, 64, 128, 60, 4, 4, honours_seed=True, diffusion_block=4)
GREEDY: dict[str, Any] = {"temperature": 0.0}


def request(logprobs: int | None = None, **sampling: Any) -> Generate:
    return Generate("r", TokenIds.of([1, 2]), Sampling(4, **GREEDY | sampling), logprobs=logprobs)


@pytest.mark.parametrize("sampling", [{}, {"stop_token_ids": (7,)}, {"ignore_eos": True}])
def test_a_diffusion_model_takes_the_likeliest_tokens(sampling: dict[str, Any]) -> None:
    check_request(request(**sampling), DIFFUSION)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.5),
        ("repetition_penalty", 1.2),
        ("frequency_penalty", 0.5),
        ("presence_penalty", 0.5),
        ("tokens_min", 2),
        ("logit_bias", {3: 5.0}),
    ],
)
def test_a_sampling_parameter_that_would_be_ignored_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(Unsupported) as refused:
        check_request(request(**{name: value}), DIFFUSION)
    assert refused.value.param == name


def test_log_probabilities_of_a_diffusion_model_are_refused() -> None:
    with pytest.raises(Unsupported, match="no log probabilities"):
        check_request(request(logprobs=0), DIFFUSION)
