"""Training: configuration, data, optimizer, metrics and the loop."""
