"""SGLang as an engine: `adapter` on the node's side; `zygote` and `host` run in processes of their own."""
