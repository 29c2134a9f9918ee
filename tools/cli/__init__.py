"""The `ballast` command."""
