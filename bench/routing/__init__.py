"""Routing by prefix: this server's policies beside each other, and its policy `kv` beside Dynamo's router."""
