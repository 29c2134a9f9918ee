"""gRPC as this project uses it: channels, servers, deadlines, error and type codecs."""
