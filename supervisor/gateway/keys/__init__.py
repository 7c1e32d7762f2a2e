"""The keys of clients, and the limits of each."""
