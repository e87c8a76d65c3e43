"""Faults: store."""
