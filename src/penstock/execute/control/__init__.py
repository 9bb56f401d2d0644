"""Ranks do this together beside their messages: they agree, share results, and find out why a step stands still."""
