"""Environment variables with a client's credentials: read by the SDK, set by flags of the command."""

TOKEN, CA_FILE, TLS, TLS_DIR = "BALLAST_TOKEN", "BALLAST_CA_FILE", "BALLAST_TLS", "BALLAST_TLS_DIR"
