"""Checks of an engine against this host: the model's own limit of tokens, its experts, and the visible GPUs.

SGLang would find the same minutes later, as a traceback. Neither SGLang nor torch is imported: the limit is computed
from `config.json` as SGLang does it, and the GPUs are counted as the driver lists them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias, cast

from protocol.strict.mistakes import Mistake
from supervisor.config.schema import Cluster, EngineSection
from supervisor.engines.sglang.diffusion import model_mistake
from supervisor.engines.sglang.embedding import model_mistakes
from supervisor.engines.sglang.experts import SglangExperts, layout_mistake
from supervisor.engines.sglang.section import SglangSection
from supervisor.files import reading

Config: TypeAlias = dict[str, object]

CONFIG = "config.json"
CONFIG_BYTES_MAX = 16 * 1024 * 1024
OVERRIDES = "json_model_override_args"
ALLOW_LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
TRUE = ("1", "true", "yes", "y")
LIMIT_KEYS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_moe_experts")
TEXT_CONFIGS = ("thinker_config", "llm_config", "language_config", "text_config")
SCALED_ALREADY = ("llama3", "yarn", "longrope")  # kinds of scaling whose factor the limit has in it

VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER = Path("/proc/driver/nvidia/gpus")  # has a folder for each GPU
OTHER_DRIVERS = (Path("/dev/kfd"), Path("/dev/dxg"))  # AMD's; Windows' own below Linux
LIST_GPUS_S = 5.0


def mistakes(cluster: Cluster, section: EngineSection, path: str, environment: Mapping[str, str]) -> Iterator[Mistake]:
    """Yield what keeps an engine on this host from starting, by the keys of its section at `path`."""
    assert isinstance(section, SglangSection)
    variables = {**environment, **section.environment}
    if section.context_max is not None and variables.get(ALLOW_LONGER, "").lower() not in TRUE:
        folder, limit = Path(), None
        with suppress(OSError, RuntimeError):  # other checks report a path that leads nowhere
            folder = cluster.model_path(section.model)
            limit = context_limit(folder, str(section.settings.get(OVERRIDES, "{}")))
        if limit is not None and section.context_max > limit:
            yield Mistake(
                f"{path}.context_max",
                f"is {section.context_max}, and the model's own limit is {limit}, by {folder / CONFIG}: lower it or"
                f' leave it out, or set {ALLOW_LONGER} = "1" in [engine.NAME.environment] if the model can do more',
            )
    architecture = None
    with suppress(OSError, RuntimeError):  # other checks report a path that leads nowhere
        architecture = architecture_of(cluster.model_path(section.model), str(section.settings.get(OVERRIDES, "{}")))
    if section.leg != "encode":
        yield from model_mistakes(cluster, section, str(section.settings.get(OVERRIDES, "{}")), path)
    if architecture is not None and section.leg != "encode" and section.task == "generate":
        wrong = model_mistake(section.diffusion, architecture, path)
        yield from () if wrong is None else (wrong,)
    yield from _expert_mistakes(cluster, section, f"{path}.experts")
    if (adapters := section.adapters) is not None:
        yield from adapters.file_mistakes(cluster.folder, cluster.model_path(section.model), f"{path}.adapters")
    if section.device == "cuda":
        yield from _gpu_mistakes(section, path, variables)


def _expert_mistakes(cluster: Cluster, section: SglangSection, path: str) -> Iterator[Mistake]:
    """Yield what the model's folder and the file of the initial layout say against the keys about experts."""
    experts = section.experts
    if experts.layout is not None and (why := layout_mistake(experts.layout_path(cluster.folder))) is not None:
        yield Mistake(f"{path}.layout", why)
    if experts == SglangExperts():
        return
    with suppress(OSError, RuntimeError):  # other checks report a path that leads nowhere
        folder = cluster.model_path(section.model)
        number = experts_of(folder, str(section.settings.get(OVERRIDES, "{}")))
        if number == 0:
            yield Mistake(path, f"is for a mixture of experts, and {section.model} has none, by {folder / CONFIG}")
        elif number is not None and (number + experts.redundant) % experts.parallel:
            yield Mistake(
                f"{path}.redundant",
                f"makes {number + experts.redundant} experts, which {experts.parallel} cannot share",
            )


def architecture_of(folder: Path, overrides: str = "{}") -> str | None:
    """Return the first architecture of a model, empty without one, None if its configuration cannot be read."""
    with suppress(OSError, ValueError, RecursionError):
        texts = (reading.read(folder / CONFIG, CONFIG_BYTES_MAX).decode(), overrides)
        return _architecture({key: value for each in texts for key, value in _table(json.loads(each)).items()})
    return None


def _architecture(config: Config) -> str:
    architectures = config.get("architectures")
    return str(architectures[0]) if isinstance(architectures, list) and architectures else ""


def experts_of(folder: Path, overrides: str = "{}") -> int | None:
    """Return the experts in a layer of a model, 0 if it is no mixture, None if its configuration cannot be read."""
    with suppress(OSError, ValueError, RecursionError):
        texts = (reading.read(folder / CONFIG, CONFIG_BYTES_MAX).decode(), overrides)
        text = _text_config({key: value for each in texts for key, value in _table(json.loads(each)).items()})
        numbers = (text.get(key) for key in EXPERT_KEYS)
        return next((number for number in numbers if isinstance(number, int)), 0)
    return None


# The model's limit ------------------------------------------------------------------------------


def context_limit(folder: Path, overrides: str = "{}") -> int | None:
    """Return the longest context that SGLang takes from the configuration of a model, None if it has none."""
    # What nests too deeply or has infinite factors, too, is for SGLang to refuse.
    with suppress(OSError, ValueError, OverflowError, RecursionError):
        texts = (reading.read(folder / CONFIG, CONFIG_BYTES_MAX).decode(), overrides)
        text = _text_config({key: value for each in texts for key, value in _table(json.loads(each)).items()})
        limit = next((value for key in LIMIT_KEYS if (value := text.get(key)) is not None), None)
        return int(_factor(text) * limit) if isinstance(limit, int | float) else None
    return None


def _text_config(config: Config) -> Config:
    """Return the part of a configuration about its language model."""
    first = _architecture(config)
    if first.startswith("Llava") and first.endswith("ForCausalLM"):
        return config
    inner = next((found for name in TEXT_CONFIGS if (found := _table(config.get(name)))), config)
    return _table(inner.get("text_config")) or inner


def _factor(text: Config) -> float:
    """Return the factor by which a scaling of positions extends the limit."""
    scaling = _table(text.get("rope_scaling")) or _table(text.get("rope_parameters"))
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
    if kind in SCALED_ALREADY or "original_max_position_embeddings" in scaling:
        return 1.0
    return float(factor) if isinstance(factor, int | float) else 1.0


def _table(value: object) -> Config:
    """Return a JSON object, an empty one for anything else."""
    return cast("Config", value) if isinstance(value, dict) else {}


# GPUs -------------------------------------------------------------------------------------------


def _gpu_mistakes(section: SglangSection, path: str, variables: Mapping[str, str]) -> Iterator[Mistake]:
    """Yield the ranks of an engine for which no GPU is visible here."""
    visible = visible_gpus(variables)
    if visible is None:
        return
    if visible == 0:
        why = f"{VISIBLE} is {variables.get(VISIBLE)!r}" if installed_gpus() else "no driver of NVIDIA is loaded"
        yield Mistake(f"{path}.device", f"is cuda, and no GPU of this host is visible: {why}")
        return
    settings = {name: _integer(section.settings.get(name), default) for name, default in SHARING.items()}
    ranks = section.tensor_parallel * settings["pp_size"] // len(section.nodes) * section.data_parallel
    needed = settings["base_gpu_id"] + (ranks - 1) * settings["gpu_id_step"] + 1
    if needed > visible:
        shares = {
            "tensor_parallel": section.tensor_parallel,
            "data_parallel": section.data_parallel,
            **{f"settings.{name}": settings[name] for name in SHARING},
        }
        defaults = {f"settings.{name}": default for name, default in SHARING.items()}
        named = [f"{key} {value}" for key, value in shares.items() if value != defaults.get(key, 1)]
        of_nodes = f" on {len(section.nodes)} nodes" if section.nodes[1:] else ""
        only = f", by {VISIBLE}" if VISIBLE in variables else ""
        yield Mistake(
            f"{path}.tensor_parallel" if section.tensor_parallel > 1 else path,
            f"needs {needed} GPUs on this host ({', '.join(named)}{of_nodes}), and {visible}"
            f" {'is' if visible == 1 else 'are'} visible{only}",
        )


SHARING = {"pp_size": 1, "base_gpu_id": 0, "gpu_id_step": 1}
"""SGLang's settings that decide which GPUs its ranks take, with their defaults."""


def _integer(value: object, default: int) -> int:
    return value if isinstance(value, int) else default


def visible_gpus(variables: Mapping[str, str]) -> int | None:
    """Return the number of GPUs that a process with these variables would see, None if it is unknown."""
    installed = installed_gpus()
    named = variables.get(VISIBLE)
    if installed is None or named is None:
        return installed
    count = 0
    for name in named.split(","):
        # CUDA stops at the first device that is not there; a device may have a long name in place of its number.
        word = name.strip()
        if not word or (word.lstrip("-").isdigit() and not 0 <= int(word) < installed):
            break
        count += 1
    return count


def installed_gpus() -> int | None:
    """Return the number of GPUs of this host, or of this container, None if it is unknown."""
    with suppress(OSError):
        return sum(1 for _ in DRIVER.iterdir())
    command = shutil.which("nvidia-smi")
    if command is not None:
        with suppress(OSError, subprocess.SubprocessError):
            listed = subprocess.run(  # noqa: S603  # the driver's own program
                [command, "-L"], capture_output=True, text=True, check=True, timeout=LIST_GPUS_S
            )
            return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return None if command is not None or any(path.exists() for path in OTHER_DRIVERS) else 0
