"""Files that people name: read whole up to a size, with permissions checked."""
