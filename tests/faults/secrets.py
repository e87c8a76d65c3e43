"""Faults: secrets."""
