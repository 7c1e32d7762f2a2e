"""Which worker gets a request: pure functions of what is known of the workers."""
