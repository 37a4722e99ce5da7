"""Models: names to folders, folders to weights, weights to logits."""
