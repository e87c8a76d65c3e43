"""Agentic knowledge base."""
