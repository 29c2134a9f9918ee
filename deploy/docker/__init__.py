"""How images are built."""
