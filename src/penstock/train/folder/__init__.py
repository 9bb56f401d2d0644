"""The folder of a run: what lies in it, who holds it, and its log."""
