"""The port of embedders, and the check that embedders of all kinds share."""
