"""The optimizer of a run, the types that it computes in, and the update of its weights."""
