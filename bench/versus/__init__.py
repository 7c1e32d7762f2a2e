"""This server beside another: both up with the same engine, loads in alternation, and ratios of what they cost."""
