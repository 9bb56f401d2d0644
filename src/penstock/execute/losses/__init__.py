"""Losses: what a loss function may return, how it is weighted, and how every rank comes to know it."""
