"""The only room with hands: it opens sockets, reads files, starts processes, handles signals, plugs ports together."""
