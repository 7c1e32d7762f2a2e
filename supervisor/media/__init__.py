"""Images and videos of clients: fetched only from where the operator allows, and decoded in processes of their own."""
