"""What an operator does not let through: block lists, and whatever is plugged in."""
