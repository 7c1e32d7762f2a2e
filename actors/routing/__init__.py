"""Routing: the choice of a request's workers, and its failover when one is lost."""
