"""The load generator: what to send (`plan`), how (`client`), from where (`worker`), and what came of it (`measure`)."""
