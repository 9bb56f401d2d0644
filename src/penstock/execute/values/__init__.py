"""Values: trees of tensors and plain numbers, and what ranks agree on about them."""
