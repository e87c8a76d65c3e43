"""A real PostgreSQL for tests that need one; it may be killed and started again."""
