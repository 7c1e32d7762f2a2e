"""The command line of an operator: the status of a running cluster, drains, reloads."""
