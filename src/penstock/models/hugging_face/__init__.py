"""Models of Hugging Face transformers: their weights, by the names that their modules have."""
