"""The tests; the folders mirror src/penstock."""
