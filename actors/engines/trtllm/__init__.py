"""Engines of the kind `trtllm`: TensorRT-LLM, in a process of its own."""
