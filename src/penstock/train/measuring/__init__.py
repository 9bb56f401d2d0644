"""The seconds of layers and channels, measured, and the split that follows from them."""
