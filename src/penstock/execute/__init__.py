"""Execution: what one rank does with its program, on real tensors and wires."""
