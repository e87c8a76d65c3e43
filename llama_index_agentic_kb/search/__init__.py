"""Searching: query embeddings in batches, and the fusion of ranked lists."""
