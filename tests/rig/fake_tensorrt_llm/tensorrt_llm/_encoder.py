"""`MultimodalEncoder`: images in, and handles of their embeddings out, in memory of the same host."""

import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from ._executor import STEP_S, Request, RequestOutput
from ._llm import ARGUMENTS
from ._types import DEFAULT_REQUEST_PRIORITY, DisaggregatedParams, SamplingParams


class MultimodalEncoder:
    def __init__(
        self,
        model: str | Path,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        **kwargs: Any,
    ) -> None:
        from ._vision import Vision

        if unknown := kwargs.keys() - ARGUMENTS.keys():
            raise ValueError(f"LLM got invalid argument: {min(unknown)}")
        self.args = {**kwargs, "model": model}
        self._vision = Vision.of(model)
        self._numbers = count(1)

    def generate_async(self, inputs: Mapping[str, Any], sampling_params: SamplingParams | None = None) -> RequestOutput:
        from ._torch.shared_tensor import SharedTensorContainer
        from ._vision import opened

        assert self._vision is not None
        if inputs["mm_processor_kwargs"] is None:
            raise TypeError("argument after ** must be a mapping, not NoneType")
        made = self._vision.preprocess(inputs, None)
        assert made.multimodal_params is not None
        time.sleep(STEP_S)
        output = RequestOutput(
            Request(
                number=next(self._numbers),
                prompt=made.prompt_token_ids,
                params=sampling_params or SamplingParams(end_id=-1, max_tokens=1),
                streaming=False,
                handed=None,
                salt=None,
                known=0,
                priority=DEFAULT_REQUEST_PRIORITY,
                rank=0,
                fault=None,
            )
        )
        data = made.multimodal_params.multimodal_data
        embedded = [opened(each) for each in data["multimodal_embedding"]]
        for each in data["mrope_config"].values():
            opened(each)
        handles = [SharedTensorContainer.from_tensor(each).dump_to_dict() for each in embedded]
        output.disaggregated_params = DisaggregatedParams(multimodal_embedding_handles=handles)
        output.finished = True
        return output

    def shutdown(self) -> None:
        pass
