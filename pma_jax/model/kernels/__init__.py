"""Kernels: products and attention with an implementation per platform."""
