"""The folder of a run: what lies in it, and who holds it."""
