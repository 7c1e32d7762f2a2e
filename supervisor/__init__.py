"""The only room with I/O: it opens sockets, reads files, starts processes, handles signals, connects ports."""
