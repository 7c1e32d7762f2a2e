"""An engine without a model: it batches, pages, caches and takes its time as stated, in the node's own process."""
