"""The processes of engines that have one: their start, their link to this node, and their end."""
