"""The data: where text comes from, how it becomes tokens, how tokens become batches."""
