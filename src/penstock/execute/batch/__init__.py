"""The batch of a step: how it is cut, supplied and agreed on."""
