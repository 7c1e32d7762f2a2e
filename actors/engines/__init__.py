"""The engine port, which every engine implements, and the engines."""
