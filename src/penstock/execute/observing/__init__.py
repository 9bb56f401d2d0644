"""Observers look at a step: its times, memory, messages and values."""
