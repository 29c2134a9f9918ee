"""Where a client's credentials are found in the environment: the SDK reads these, flags of the command set them."""

TOKEN, CA_FILE, TLS, TLS_DIR = "BALLAST_TOKEN", "BALLAST_CA_FILE", "BALLAST_TLS", "BALLAST_TLS_DIR"
