"""Checks of the images, the compose file, the manifests and the packages, and what they need."""
