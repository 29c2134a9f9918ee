"""gRPC as this project uses it: channels, servers, deadlines, error and type codecs."""

import os

# gRPC writes a line for each handshake that fails, without a bound: what is wrong with a peer our own logs say.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
