"""Splitting a model's layers into consecutive stages."""
