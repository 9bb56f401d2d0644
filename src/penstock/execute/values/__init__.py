"""Values: trees of tensors and scalars, and what ranks agree on about them."""
