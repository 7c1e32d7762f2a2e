"""The control plane of a node: status, drain and reload, over links and over a Unix socket."""
