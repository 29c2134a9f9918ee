"""Images, compose file, and the check that what they say works."""
