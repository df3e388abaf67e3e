"""A decoder-only transformer in flax nnx, its loss, and the paper's ladder of sizes."""
