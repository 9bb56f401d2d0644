"""What happens when a step fails or hangs."""
