"""Searching: query embeddings in batches, words (BM25) in an index of their own, fusion and reranking of lists."""
