"""What every actor shares: addresses and calls, inboxes, fair queues, and work kept out of the event loop."""
