"""What a run is told: the keys of its file, the rules between them, and what follows from them by arithmetic."""
