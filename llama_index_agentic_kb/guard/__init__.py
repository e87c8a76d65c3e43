"""What stands between users and their documents: permissions, resilience, and hostile text made harmless."""
