"""One module a revision, named for its number."""
