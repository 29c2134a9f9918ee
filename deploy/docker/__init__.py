"""Parts of the build of the images."""
