"""Checkpoint formats: opening, reading and writing anybody's checkpoints; knows nothing of models or merging."""
