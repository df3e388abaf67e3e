"""The model: a decoder-only transformer in flax nnx."""
