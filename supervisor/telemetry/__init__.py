"""What a node reports of itself: metrics, logs, and how long turns of its event loop take."""
