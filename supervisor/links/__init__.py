"""Links: many streams between two nodes over one connection, with backpressure, deadlines, and heartbeats."""
