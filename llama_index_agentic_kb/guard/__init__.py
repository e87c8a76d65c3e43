"""Protection of requests: permissions, resilience, size limits, and neutralisation of hostile text."""
