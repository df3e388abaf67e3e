"""Tasks that lm-eval scores a model on: where they come from, and the bits per byte of their gold answers."""
