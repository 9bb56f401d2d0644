"""The settings of a run: the keys of its file, the rules between them, and what follows from them by arithmetic."""
