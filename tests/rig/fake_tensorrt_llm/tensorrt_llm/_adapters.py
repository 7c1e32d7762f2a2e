"""The adapters of one engine: their weights by number, and which of them are in the memory of the GPU."""

import json
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from attrs import define, field

from ._model import digest
from ._types import LoraConfig, LoRARequest

DEVICE_MAX = 8  # adapters, unless a number is configured


@define
class Adapters:
    """An adapter is found by its number alone: what is loaded is not read again, nor given up."""

    config: LoraConfig
    weights: dict[int, int] = field(init=False, factory=dict)  # what the model knows of each
    device: OrderedDict[int, None] = field(init=False, factory=OrderedDict)  # the one used last at the end
    evictions: int = 0

    def __attrs_post_init__(self) -> None:
        if not self.config.lora_dir:
            assert self.config.lora_target_modules, "Expecting at least one lora target module"

    @property
    def device_max(self) -> int:
        return self.config.max_loras or DEVICE_MAX

    def load(self, lora: LoRARequest) -> int:
        """Return what the model knows of an adapter, whose files are read for the first request with its number."""
        if lora.lora_int_id not in self.weights:
            folder = Path(lora.lora_path)
            rank = json.loads((folder / "adapter_config.json").read_text())["r"]
            if not (file := folder / "adapter_model.safetensors").exists():
                raise ValueError(f"Failed to load adapter_model from {folder}")
            if rank > self.config.max_lora_rank:
                raise ValueError(
                    f"Invalid low_rank ({rank}). low_rank must be smaller than {self.config.max_lora_rank}"
                )
            self.weights[lora.lora_int_id] = digest(list(file.read_bytes()), 1)
        return self.weights[lora.lora_int_id]

    def fits(self, number: int, running: Iterable[int]) -> bool:
        """Whether there is room in the memory of the GPU beside the adapters of running requests; takes it if so."""
        used = {*running} - {number}
        if len(used) >= self.device_max:
            return False
        self.device[number] = None
        self.device.move_to_end(number)
        for other in [*self.device]:
            if len(self.device) > self.device_max and other not in used | {number}:
                del self.device[other]
                self.evictions += 1
        return True
