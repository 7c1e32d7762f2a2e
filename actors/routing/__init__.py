"""Routing: which workers get a request, and what follows when one is lost."""
