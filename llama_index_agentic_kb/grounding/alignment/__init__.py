"""Lexical alignment: where a passage says what a claim says, and whether numbers, dates, names and polarity agree."""
