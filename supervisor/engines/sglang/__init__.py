"""SGLang engines as children of the tree: their processes, their ranks on other nodes, their ports."""
