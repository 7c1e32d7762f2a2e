"""The decoder processes: they parse what clients send as images and videos, and no node ever imports this folder."""
