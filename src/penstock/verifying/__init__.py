"""Comparing a model that is cut into layers with the unsplit one: outputs, losses, gradients and buffers."""
