"""TensorRT-LLM's engines on a node: their section, and the children that run them."""
