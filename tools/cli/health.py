"""`ballast health`: checks one service's health, for container health checks. Exit status 0 or 1."""

import argparse
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ballast.client.access import Access
from ballast.common.addresses import checked_address
from ballast.common.errors import BallastError, NotFound, Unavailable
from ballast.rpc.errors import from_rpc_error
from tools.cli.access import add_access
from tools.cli.arguments import Commands, add_json
from tools.cli.output import print_json

# Kind of service -> gRPC service whose health is checked; "": the whole process, because a healthy standby is not
# ready.
_PROOFS = {
    "dispatcher": "ballastpb.inference.v1.InferenceService",
    "worker": "ballastpb.worker.v1.WorkerService",
    "monitor": "",
    "planner": "",
}


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("health", help="check whether a service is ready")
    parser.set_defaults(run=run)
    _add_arguments(parser)
    add_json(parser)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("service", choices=list(_PROOFS), help="kind of the service")
    parser.add_argument("address", metavar="HOST:PORT", help="address of the service")
    add_access(parser)
    parser.add_argument("--timeout-s", type=float, default=3.0, metavar="S", help="timeout for its answer (3)")


def run(args: argparse.Namespace) -> int:
    address = checked_address(args.address)
    if not getattr(args, "json", False):
        check(args.service, address, args.timeout_s)
        print(f"{args.service} at {address} is healthy")
        return 0
    why = ""
    try:
        check(args.service, address, args.timeout_s)
    except BallastError as error:
        why = str(error) or type(error).__name__
    print_json({"service": args.service, "address": address, "healthy": not why, "why": why})
    return 1 if why else 0


def check(service: str, address: str, timeout_s: float) -> None:
    """Check that a service is healthy.

    Raises:
        BallastError: the service is not ready, does not answer in time, or is of another kind.
    """
    with Access.of().open_sync(address, service) as channel:
        # Any: the gRPC health package has no types
        stub = health_pb2_grpc.HealthStub(channel)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        try:
            response = stub.Check(health_pb2.HealthCheckRequest(service=_PROOFS[service]), timeout=timeout_s)  # pyright: ignore
        except grpc.RpcError as error:
            failed = from_rpc_error(error, address)
            if isinstance(failed, NotFound):
                failed = Unavailable(address, f"another service answers there, which is no {service}")
            raise failed from error
    if response.status != health_pb2.HealthCheckResponse.SERVING:  # pyright: ignore
        raise Unavailable(address, f"the {service} answers, but is not ready")


def main() -> int:
    """`python -m tools.cli.health`: this command alone, which starts fast enough to be run every few seconds."""
    parser = argparse.ArgumentParser(prog="python -m tools.cli.health")
    _add_arguments(parser)
    try:
        return run(parser.parse_args())
    except BallastError as error:
        print(f"ballast: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
