"""Worker threads: long text work, the reading of files while a node runs, and writers that must not block."""
