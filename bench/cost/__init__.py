"""The price of a token and of a request: what the processes of a server spend on a load, by their part in it."""
