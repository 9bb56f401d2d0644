"""A module's own forward, cut at submodules: each part runs it between two of them, with stand-ins for all others."""
