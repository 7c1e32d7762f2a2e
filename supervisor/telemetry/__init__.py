"""The telemetry of a node: its metrics, its log, and the monitor of its event loop."""
