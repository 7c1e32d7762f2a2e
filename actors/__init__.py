"""One file an actor: an async function whose arguments are its ports."""
