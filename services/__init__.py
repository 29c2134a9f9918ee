"""The deployable services; each runs as `python -m services.<name>`."""
