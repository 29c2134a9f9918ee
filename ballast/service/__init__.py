"""What every deployable does the same way: settings, logging, metrics, state server, lifecycle."""
