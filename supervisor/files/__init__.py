"""Files named by the configuration: read whole up to a limit, with their permissions checked."""
