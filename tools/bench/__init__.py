"""`ballast bench`: load generation and measurement."""
