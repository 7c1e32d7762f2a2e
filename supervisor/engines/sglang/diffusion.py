"""The keys about diffusion language models, and the checks of them beside an engine's other keys and its model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, TypeAlias

import attrs
from attrs import frozen

from actors.engines.sglang.spec import Setting
from protocol.strict.checks import Within
from protocol.strict.mistakes import Mistake
from supervisor.config.schema import EngineSection

Algorithm: TypeAlias = Literal["LowConfidence", "JointThreshold"]
Probability: TypeAlias = Annotated[float, Within(at_least=0, at_most=1)]

ARCHITECTURES = ("SDARForCausalLM", "SDARMoeForCausalLM", "LLaDA2MoeModelLM", "DiffusionGemmaForBlockDiffusion")
"""The architectures that SGLang 0.5.23 takes for diffusion models (`sglang/srt/dllm/config.py`)."""

UNTRIED = ("DiffusionGemmaForBlockDiffusion",)
"""Those of them that want an algorithm of their own, and a GPU."""

OF_JOINT_THRESHOLD = ("edit_threshold", "max_post_edit_steps", "penalty_lambda")
DISABLED = ("enable_mixed_chunk", "enable_hierarchical_cache", "enable_lmcache", "enable_flexkv")
"""The settings that SGLang disables for a diffusion model, with a warning in a log."""


@frozen(kw_only=True)
class DiffusionSettings:
    """`[engine.NAME.diffusion_settings]`: the settings of the algorithm; SGLang's own by default."""

    threshold: Probability | None = None  # probability above which a token is taken; the likeliest one always is
    block_size: Annotated[int, Within(at_least=1, at_most=1024)] | None = None  # tokens computed together
    edit_threshold: Probability | None = None  # of `JointThreshold`: probability above which a token is replaced
    # of `JointThreshold`: steps for replacements once all tokens are there
    max_post_edit_steps: Annotated[int, Within(at_least=0, at_most=1024)] | None = None
    penalty_lambda: Annotated[float, Within(at_least=0)] | None = None  # of `JointThreshold`: against repetition

    @property
    def arguments(self) -> dict[str, Setting]:
        """The settings that are given, by SGLang's names, which are the same."""
        return {name: value for name, value in attrs.asdict(self).items() if value is not None}


def mistakes(
    algorithm: Algorithm | None,
    own: DiffusionSettings,
    section: EngineSection,
    settings: Mapping[str, Setting],
    path: str,
    *,
    has_adapters: bool,
) -> Iterator[Mistake]:
    """Yield the mistakes of an engine's keys about diffusion, and of SGLang's settings beside them."""
    given = own.arguments
    if algorithm is None:
        if given:
            yield Mistake(f"{path}.diffusion_settings", "means nothing without diffusion")
        return
    if algorithm != "JointThreshold":
        for name in given.keys() & {*OF_JOINT_THRESHOLD}:
            yield Mistake(f"{path}.diffusion_settings.{name}", "is a setting of JointThreshold")
    beside = {
        "leg": section.leg != "both",
        "admission": section.admission == "slots",  # without memory for a block SGLang's scheduler ends
        "adapters": has_adapters,
        "settings.pp_size": settings.get("pp_size", 1) != 1,
        **{f"settings.{name}": bool(settings.get(name)) for name in DISABLED},
    }
    for key in (key for key, is_wrong in beside.items() if is_wrong):
        needed = {"leg": "both", "admission": "memory"}.get(key)
        yield Mistake(f"{path}.{key}", f"must be {needed or 'left out'} for a diffusion model")


def model_mistake(diffusion: str | None, architecture: str, path: str) -> Mistake | None:
    """Return what the architecture of a model says against the key `diffusion`, None if they agree."""
    key = f"{path}.diffusion"
    if architecture in UNTRIED:
        return Mistake(key, f"{architecture} wants an algorithm of its own, which has not been tried here")
    if architecture in ARCHITECTURES and diffusion is None:
        return Mistake(
            key, f'is missing: {architecture} is a diffusion language model; write diffusion = "LowConfidence"'
        )
    if architecture not in ARCHITECTURES and diffusion is not None:
        return Mistake(key, f"is for diffusion language models, and {architecture or 'the model'} is none")
    return None
