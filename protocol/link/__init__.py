"""The protocol of a link between two programs, without I/O: frames, streams, attached bytes and the greeting."""
