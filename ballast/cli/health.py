"""`ballast health`: asks one service whether it can do its job. For health checks of containers; exit status 0 or 1."""

import argparse
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ballast.cli.arguments import Commands
from ballast.client.endpoints import checked_address
from ballast.common.errors import BallastError, Unavailable
from ballast.rpc.errors import from_rpc_error

# What proves that a service of this kind does its job; a standby of the others is healthy when it answers at all.
_PROOFS = {
    "dispatcher": "ballastpb.inference.v1.InferenceService",
    "worker": "ballastpb.worker.v1.WorkerService",
    "monitor": "",
    "planner": "",
}


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("health", help="ask one service whether it can do its job")
    parser.set_defaults(run=run)
    _add_arguments(parser)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("service", choices=list(_PROOFS))
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--timeout-s", type=float, default=3.0, metavar="S")


def run(args: argparse.Namespace) -> int:
    check(args.service, checked_address(args.address), args.timeout_s)
    print(f"{args.service} at {args.address} is healthy")
    return 0


def check(service: str, address: str, timeout_s: float) -> None:
    """Returns if the service is healthy.

    Raises:
        Unavailable: it is not, or does not answer in time.
    """
    with grpc.insecure_channel(address) as channel:
        # Any type would do: the add-on has none.
        stub = health_pb2_grpc.HealthStub(channel)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        try:
            response = stub.Check(health_pb2.HealthCheckRequest(service=_PROOFS[service]), timeout=timeout_s)  # pyright: ignore
        except grpc.RpcError as error:
            raise from_rpc_error(error, address) from error
    if response.status != health_pb2.HealthCheckResponse.SERVING:  # pyright: ignore
        raise Unavailable(address, f"the {service} answers, but is not ready")


def main() -> int:
    """`python -m ballast.cli.health`: the same without the other commands, quick enough for every few seconds."""
    parser = argparse.ArgumentParser(prog="python -m ballast.cli.health")
    _add_arguments(parser)
    try:
        return run(parser.parse_args())
    except BallastError as error:
        print(f"ballast: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
