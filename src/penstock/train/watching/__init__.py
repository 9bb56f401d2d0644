"""What is shown, written and found out about the steps of a run."""
