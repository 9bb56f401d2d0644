"""Splitting a model's layers into consecutive stages."""

from penstock.partition.balance import balance
from penstock.partition.split import describe_split, split_layers, split_over

__all__ = ["balance", "describe_split", "split_layers", "split_over"]
