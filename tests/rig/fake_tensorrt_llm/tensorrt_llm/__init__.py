"""A recorded fake of TensorRT-LLM, typed by hand after its published signatures; it is on no GPU, and has no model.

A host process imports it as `tensorrt_llm` with `tests/rig/fake_tensorrt_llm` on its `PYTHONPATH`, and a test under its
whole name. Its answers follow from the prompt, the seed and the adapter (`_model.py`). It behaves as is reported of the
package: an answer is one object that grows, an abort has no acknowledgement, a stop token is cut off, and so on. It
fails on request: see `_faults.py`.
"""

from ._encoder import MultimodalEncoder
from ._executor import RequestOutput
from ._llm import LLM
from ._types import SamplingParams
from .version import __version__

__all__ = ["LLM", "MultimodalEncoder", "RequestOutput", "SamplingParams", "__version__"]
