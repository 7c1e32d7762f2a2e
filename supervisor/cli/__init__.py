"""The commands of an operator: the status of a running cluster, drains, reloads."""
