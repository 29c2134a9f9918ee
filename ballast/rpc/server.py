"""A gRPC server as run by every service: health, reflection, error conversion, limits, one listening port."""

import resource
import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ballast.common.errors import ConfigError, InvariantViolation
from ballast.rpc.bounds import CallBounds
from ballast.rpc.callers import Admit
from ballast.rpc.channel import SERVER_OPTIONS, connection_age
from ballast.rpc.failures import CallFailure, ErrorInterceptor, log_failure

_OTHER_FILES = 512  # file descriptors reserved for files and for connections opened by this process
_MOST_CONNECTIONS = 1 << 20


# Any: the message types do not matter here.
def when_done(context: grpc.aio.ServicerContext[Any, Any], act: Callable[[], None]) -> None:
    """Call `act` as soon as the call has ended for any reason. (A generator's `finally` may run much later.)"""

    def callback(_: object) -> None:
        act()

    context.add_done_callback(cast(Any, callback))


def ensure_free(host: str, port: int) -> None:
    """Raise ConfigError if the address cannot be bound. Services call it before slow work that precedes listening."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise _cannot_listen(host, port) from error


def _cannot_listen(host: str, port: int) -> ConfigError:
    return ConfigError("port", f"cannot listen on {host}:{port} (in use?); choose another with --port")


def room_for_connections() -> int:
    """Limit on incoming connections that leaves file descriptors for everything else: the process's limit on open files
    minus 512, or half of it if that is more.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return min(_MOST_CONNECTIONS, max(64, most - min(most // 2, _OTHER_FILES)))


class Register(Protocol):
    """The generated `add_XServicer_to_server` with its servicer bound."""

    def __call__(self, server: grpc.aio.Server) -> None: ...


class RpcServer:
    """A listening port with the given services, grpc.health.v1 and reflection.

    The health of "" is SERVING while the process is alive, that of a service's full name while it is ready
    (`set_ready`). `Watch` reports every change.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        services: Sequence[tuple[ServiceDescriptor, Register]],
        on_bug: Callable[[InvariantViolation], None],
        on_failure: Callable[[CallFailure], None] = log_failure,
        credentials: grpc.ServerCredentials | None = None,
        admit: Admit | None = None,
        bounds: CallBounds | None = None,
        connection_age_s: float | None = None,
    ) -> None:
        """`credentials`: TLS credentials; None: no TLS. `admit`: authenticates each call, except health and reflection;
        None: all calls are permitted. `connection_age_s`: age at which connections are closed, so that clients
        reconnect and find new servers of the same name; None: no limit.
        """
        bounds = bounds or CallBounds(connections=room_for_connections())
        interceptors = [ErrorInterceptor(on_bug, on_failure, admit, bounds)]
        ages = () if connection_age_s is None else connection_age(connection_age_s)
        self._server = grpc.aio.server(options=(*SERVER_OPTIONS, *bounds.options, *ages), interceptors=interceptors)
        self._credentials = credentials
        self._host = host
        self._port = port
        self._names = [descriptor.full_name for descriptor, _ in services]
        # Any: `health.aio` is attached at run time and has no types.
        self._health = cast(Any, health).aio.HealthServicer()
        for _, register in services:
            register(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> int:
        """Start listening and return the port, which the system chooses if 0 was given.

        Raises:
            ConfigError: the port is taken, or the host does not exist.
        """
        ensure_free(self._host, self._port)
        try:
            listen_on = f"{self._host}:{self._port}"
            if self._credentials is None:
                self._port = self._server.add_insecure_port(listen_on)
            else:
                self._port = self._server.add_secure_port(listen_on, self._credentials)
        except RuntimeError as error:
            raise _cannot_listen(self._host, self._port) from error
        await self._server.start()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(False)
        return self._port

    async def set_ready(self, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Stop serving: new calls are refused, running ones are ended after `grace_s`."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
