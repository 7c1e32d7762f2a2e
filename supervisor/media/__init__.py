"""Images and videos of clients: fetched only from allowed sources, and decoded in processes of their own."""
