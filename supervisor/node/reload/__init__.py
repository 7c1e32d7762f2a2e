"""The reload of the configuration of a running node, and the validation of its files."""
