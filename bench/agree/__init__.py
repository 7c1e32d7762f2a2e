"""Our load generator beside others': the same load on one server, in alternation, and ratios of their figures."""
