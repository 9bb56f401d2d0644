"""A backward in two parts: what waits for the second, and how it gets there."""
