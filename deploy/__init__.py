"""Checks of the images, the compose file, the manifests and the packages, and their helpers."""
