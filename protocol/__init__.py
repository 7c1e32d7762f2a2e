"""Every message, error, rule and shape of the system, with no I/O, no clock and no tasks."""
