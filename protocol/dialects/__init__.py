"""The languages that clients speak, as pure data: bytes to requests, and replies to bytes."""
