"""Listening sockets under attack: descriptors kept in reserve, and limits on peers that have not authenticated."""
