"""Models of Hugging Face transformers as lists of layers: their own forward, names and files."""
