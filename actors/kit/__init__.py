"""Parts that all actors share: addresses and calls, inboxes, fair queues, and work kept out of the event loop."""
