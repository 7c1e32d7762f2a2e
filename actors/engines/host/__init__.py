"""The process of an engine of any kind that has one: its end of the link to its node, and its watchdog."""
