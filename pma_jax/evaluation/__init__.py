"""Evaluation: loss in nats, perplexity and bits per byte."""
