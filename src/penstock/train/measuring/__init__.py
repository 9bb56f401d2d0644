"""What layers and channels take, and the split that follows from it."""
