"""Names of the environment variables with a client's credentials. The SDK reads them; flags of `ballast` set them."""

TOKEN, CA_FILE, TLS, TLS_DIR = "BALLAST_TOKEN", "BALLAST_CA_FILE", "BALLAST_TLS", "BALLAST_TLS_DIR"
