"""Merging checkpoints: recipes (tokens -> coefficients), averager, engine."""
