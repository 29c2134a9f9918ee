"""Images, the compose file, and checks that they work."""
