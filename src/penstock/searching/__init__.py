"""Finding better plans than the one at hand, each proved or simulated by the same code that runs it."""
