"""The cluster as one node sees it: a mesh of links, a directory of workers, and what crosses between nodes."""
