"""The children that compute: engines of each kind, and the actors that give them work."""
