"""The steps of a run, shown, written and diagnosed."""
