"""The messages that cross links, one file a subject: frozen classes, and the rows that number them."""
