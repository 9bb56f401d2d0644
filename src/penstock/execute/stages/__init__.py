"""The stages of a rank: which layers they hold, and how each runs forward and backward."""
