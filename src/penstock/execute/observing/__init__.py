"""What can be seen of a step: times, memory, messages, values."""
