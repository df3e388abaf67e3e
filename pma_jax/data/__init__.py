"""Training data: corpora of documents, tokenizers, token shards and batches."""
