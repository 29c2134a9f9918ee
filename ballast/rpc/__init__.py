"""gRPC as used in this project: channels, servers, deadlines, codecs of errors and types."""

import os

# gRPC logs a line for every failed handshake, without a limit; our own logs report problems with peers.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# gRPC's fork handlers kill programs that uvloop starts while calls run before they are executed, or break the calls.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
