"""One suite over real vector stores; ``python -m tests.stores`` writes the table in docs/stores.md."""
