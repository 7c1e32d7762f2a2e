"""The documents of benches as one page, and the targets that they are compared with."""
