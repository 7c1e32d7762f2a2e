"""The control plane: what operators ask of a node, over links and over a Unix socket."""
