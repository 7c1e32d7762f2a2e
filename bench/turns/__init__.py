"""The price of an agent's turn: sessions that grow against a server, and what each of their turns costs it."""
