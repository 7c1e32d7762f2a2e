"""Worker threads: long text work, files that are read while a node runs, and writers that must not block."""
