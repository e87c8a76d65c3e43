"""Fuzzing: readers of outside text, fed with anything."""
