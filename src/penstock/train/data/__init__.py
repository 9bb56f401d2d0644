"""From files to batches: documents, tokens, sequences, and the batch of any step."""
