"""Search of the layers of each stage, of what stages recompute, and of the order, together."""
