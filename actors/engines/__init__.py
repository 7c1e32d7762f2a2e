"""What every engine keeps, and the engines that keep it."""
