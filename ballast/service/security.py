"""Access control: TLS with certificates between services, tokens at dispatchers, and the calls permitted to each role.

A service without TLS, or a dispatcher without tokens, listens only on loopback unless `--insecure` is given. The threat
model is in docs/security.md.
"""

import contextlib
import functools
import ipaddress
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio
from prometheus_client import Counter, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from pydantic import Field
from pydantic_settings import CliImplicitFlag

from ballast.common.errors import BallastError, ConfigError, PermissionDenied, Unauthenticated
from ballast.rpc.callers import Admit, Caller, caller
from ballast.rpc.channel import Dial, open_channel
from ballast.rpc.tls import HANDSHAKES, TlsFolder
from ballast.service.logs import LogFormat, LogLevel, get_logger
from ballast.service.metrics import REGISTRY
from ballast.service.settings import Settings
from ballast.service.tokens import TokenBook, TokenRole, cluster_token

_MIN_SECRET_BYTES = 16
_DAY_S = 86400.0
CERTIFICATE_WARN_S = 30 * _DAY_S

_REFUSED = Counter(
    "ballast_calls_refused_total",
    "Refused calls by reason: no or unknown token, insufficient role, id of another service",
    ["reason"],
    registry=REGISTRY,
)


class _HandshakeMetrics(Collector):
    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "ballast_tls_handshakes_failed",
            "TLS connections without a call: the client had a certificate of another CA, or did not use TLS",
            HANDSHAKES.failed_count,
        )


REGISTRY.register(_HandshakeMetrics())


class _Certificates(Collector):
    """Gauge of the seconds until each certificate of this process expires. A certificate that expires within 30 days is
    logged daily.
    """

    def __init__(self) -> None:
        self._folders: dict[Path, TlsFolder] = {}
        self._warned_at_s: dict[Path, float] = {}

    def add(self, folder: TlsFolder) -> None:
        self._folders[folder.path] = folder
        self._left_s(folder)

    def collect(self) -> Iterator[Metric]:
        text = "Remaining validity of this process's certificate, in seconds"
        family = GaugeMetricFamily("ballast_certificate_expires_seconds", text, labels=["folder"])
        for path, folder in self._folders.items():
            with contextlib.suppress(ConfigError):
                family.add_metric([path.name], self._left_s(folder))
        yield family

    def _left_s(self, folder: TlsFolder) -> float:
        left_s, now_s = folder.left_s(), time.monotonic()
        if left_s < CERTIFICATE_WARN_S and now_s >= self._warned_at_s.get(folder.path, -math.inf) + _DAY_S:
            self._warned_at_s[folder.path] = now_s
            days = f"{left_s / _DAY_S:.1f}"
            get_logger().warning("certificate ends soon: `ballast certs --renew`", path=str(folder.path), days=days)
        return left_s


_CERTIFICATES = _Certificates()
REGISTRY.register(_CERTIFICATES)

# Any: the message types do not matter here.
_Context = grpc.aio.ServicerContext[Any, Any]


class Role(StrEnum):
    """The role of a process according to its certificate."""

    MONITOR = "monitor"
    PLANNER = "planner"
    DISPATCHER = "dispatcher"
    WORKER = "worker"
    GATEWAY = "gateway"
    JOBS = "jobs"
    OPERATOR = "operator"  # an operator's tool that calls services directly, without a dispatcher


_CONTROL = frozenset({Role.DISPATCHER, Role.OPERATOR})
_WATCHING = frozenset({Role.PLANNER, Role.DISPATCHER, Role.OPERATOR})
_ORDERS = frozenset({Role.PLANNER})

# Method -> roles that may call it. Calls of other methods are denied.
_MONITOR, _PLANNER, _WORKER = (f"/ballastpb.{s}.v1.{s.capitalize()}Service/" for s in ("monitor", "planner", "worker"))
MAY_CALL: Mapping[str, frozenset[Role]] = {
    f"{_MONITOR}Report": frozenset({Role.WORKER}),
    f"{_MONITOR}WatchEvents": frozenset({Role.PLANNER, Role.OPERATOR}),
    f"{_MONITOR}GetClusterStatus": _WATCHING,
    **{
        f"{_PLANNER}{name}": _CONTROL
        for name in (
            *("GetLayout", "WatchLayout", "DrainWorker", "ParkWorker", "WakeWorker"),
            *("ExplainPlan", "Drop", "Restore", "ListTransitions"),
        )
    },
    f"{_WORKER}Attach": frozenset({Role.DISPATCHER}),
    f"{_WORKER}GetStatus": _WATCHING | {Role.GATEWAY},  # the gateway's page shows each member's memory
    f"{_WORKER}GetTrace": frozenset({Role.OPERATOR}),
    f"{_WORKER}GetTransition": frozenset({Role.PLANNER, Role.OPERATOR}),
    **{
        f"{_WORKER}{name}": _ORDERS
        for name in ("Prepare", "Commit", "Abort", "Migrate", "NamePartners", "Drain", "Park")
    },
}
# Dispatcher methods that tokens with the role infer may call; all others require the role operate.
_INFERENCE = "/ballastpb.inference.v1.InferenceService/"
INFERS = frozenset(f"{_INFERENCE}{name}" for name in ("Generate", "Cancel", "Tokenize", "Detokenize", "GetModelInfo"))


class GuardedSettings(Settings):
    """Settings of every service that listens on a port: address, protection and logging."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    advertise_host: str | None = None
    """Name or address under which other services reach this one. Default: the host it listens on, or this machine's
    name if that is 0.0.0.0 or ::."""
    tls_dir: Path | None = None
    """Folder with tls.crt, tls.key and ca.crt of this service, created by `ballast certs`. The other services then need
    certificates of the same CA."""
    cluster_secret_file: Path | None = None
    """File with the secret that all services of the cluster share."""
    insecure: CliImplicitFlag[bool] = False
    """Listen on addresses other than loopback without authentication: anyone who can reach the port has full
    access."""
    log_level: LogLevel = "info"
    """Minimum level of logged messages."""
    log_format: LogFormat = "console"
    """Format of the log: console for people, json for programs."""


class ServiceSettings(GuardedSettings):
    """Settings common to all services of the cluster."""

    metrics_host: str = "127.0.0.1"
    """Address to serve Prometheus metrics on."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of the Prometheus metrics; 0: no metrics."""
    redis_url: str = "redis://127.0.0.1:6379/0"
    """URL of the state server: redis://HOST:PORT/DB, or rediss:// for TLS."""
    redis_user: str | None = None
    """ACL user at the state server."""
    redis_password_file: Path | None = None
    """File with the password for the state server. A password in the URL is visible to other users of the machine."""
    redis_ca_file: Path | None = None
    """CA certificate for a state server at rediss://. Default: the system's CAs."""


class Security:
    """The credentials of a service with the role `role`, and its checks of callers."""

    def __init__(self, role: Role, settings: GuardedSettings) -> None:
        """Raises ConfigError if a file cannot be used."""
        self.secret = None if settings.cluster_secret_file is None else read_secret(settings.cluster_secret_file)
        self._role = role
        self._insecure = settings.insecure
        self._tls = None if settings.tls_dir is None else TlsFolder(settings.tls_dir)
        if self._tls is not None:
            _CERTIFICATES.add(self._tls)

    def dial(self, peer: Role, *, watchful: bool = False) -> Dial:
        """Returns a function that opens channels to services of role `peer`; `watchful` as in `open_channel`."""
        if self._tls is None:
            return functools.partial(open_channel, watchful=watchful)
        tls = self._tls

        def opened(address: str) -> grpc.aio.Channel:
            return open_channel(address, tls.channel_credentials(), peer, watchful=watchful)

        tls.channel_credentials()  # reports invalid files at startup
        return opened

    def credentials(self) -> grpc.ServerCredentials | None:
        """Server credentials, or None without TLS. Clients need a certificate, except at dispatchers, where they need a
        token.
        """
        if self._tls is None:
            return None
        return self._tls.server_credentials(asks_clients=self._role is not Role.DISPATCHER)

    def admit_peers(self) -> Admit | None:
        """The check of callers by their certificates; None without TLS."""
        return None if self._tls is None else admit_peer

    def tokens(self, file: Path | None) -> TokenBook | None:
        """The tokens that are accepted from clients: those of the file, and the cluster's own; None without a file."""
        return None if file is None else TokenBook(file, None if self.secret is None else cluster_token(self.secret))

    def ensure_guarded(self, hosts: Iterable[str | None], *, tokens: bool = True, links: bool = False) -> None:
        """Check the protection of a service before it listens on `hosts`. `tokens`: clients' tokens are checked or not
        needed. `links`: the service accepts links of other workers, which needs the cluster secret.

        Raises:
            ConfigError: a host is not loopback, and the protection is incomplete.
        """
        beyond = next((host for host in hosts if host is not None and not is_loopback(host)), None)
        if beyond is None or self._insecure:
            return
        wanted = {"--tls-dir": self._tls is None, "--tokens-file": not tokens}
        wanted["--cluster-secret-file"] = links and self.secret is None
        lacking = [flag for flag, is_lacking in wanted.items() if is_lacking]
        if lacking:
            raise ConfigError(
                f"{self._role}.host",
                f"{beyond} is reached from other machines, so this needs {' and '.join(lacking)} (`ballast certs` and"
                " `ballast tokens` make the files, docs/security.md says how); or --insecure, which gives full"
                " access to anyone who can reach the port",
            )


def read_secret(path: Path) -> bytes:
    """Read the cluster's secret.

    Raises:
        ConfigError: the file cannot be read, or the secret is too short.
    """
    secret = read_file(path)
    if len(secret) < _MIN_SECRET_BYTES:
        raise ConfigError(str(path), f"must have at least {_MIN_SECRET_BYTES} bytes; `ballast certs` makes one")
    return secret


def read_file(path: Path) -> bytes:
    """The contents of a file without surrounding whitespace.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error


def refuse(reason: str, error: BallastError) -> NoReturn:
    """Count the refusal of the current call and raise `error`."""
    _REFUSED.labels(reason).inc()
    raise error


def require_worker(worker_id: str) -> None:
    """Check that the caller's certificate permits it to act as this worker.

    Raises:
        PermissionDenied: the caller's certificate is another worker's.
    """
    name = caller().name
    allowed = name.removeprefix(f"{Role.WORKER}/")
    # A process with the id ID may have several workers: ID.0, ID.1 ...
    if name and allowed != "*" and worker_id != allowed and not worker_id.startswith(f"{allowed}."):
        refuse("worker_id", PermissionDenied(f"the certificate of {name} is not good for worker {worker_id}"))


def admit_peer(method: str, context: _Context) -> Caller:
    """The `Admit` of services that other services call over TLS: authenticates the caller by its certificate.

    Raises:
        Unauthenticated: the certificate contains no role.
        PermissionDenied: the role may not call the method.
    """
    role, identity = _identity_of(context)
    if role is None:
        refuse("certificate", Unauthenticated("the certificate names no role of a Ballast cluster"))
    if role not in MAY_CALL.get(method, ()):
        refuse("role", PermissionDenied(f"a {role} may not call {method.rpartition('/')[2]}"))
    return Caller(identity, operates=role in _CONTROL)


def _identity_of(context: _Context) -> tuple[Role | None, str]:
    """(role, ROLE/ID) in the caller's certificate; (None, "") if it contains none."""
    found = context.auth_context() or {}
    for uri in found.get("peer_uri", ()):
        identity = bytes(uri).decode(errors="replace").removeprefix("ballast://")
        role, slash, name = identity.partition("/")
        if role in list(Role) and slash and name:
            return Role(role), identity
    return None, ""


class TokenAuthority:
    """The `Admit` of dispatchers: authenticates callers by `authorization: Bearer TOKEN` in the call's metadata.

    A call raises Unauthenticated for a missing or unknown token, and PermissionDenied if its role does not suffice.
    """

    def __init__(self, book: TokenBook) -> None:
        self._book = book

    def __call__(self, method: str, context: _Context) -> Caller:
        given = _bearer(context)
        if given is None:
            why = "a token is needed: --token or BALLAST_TOKEN of `ballast`, token= of the SDK, authorization: Bearer"
            refuse("no_token", Unauthenticated(why))
        token = self._book.find(given)
        if token is None:
            refuse("unknown_token", Unauthenticated("the token is not known here; was it revoked?"))
        operates = token.role is TokenRole.OPERATE
        if not operates and method not in INFERS:
            what = method.rpartition("/")[2]
            refuse("role", PermissionDenied(f"{what} needs a token with the role operate; {token.name} may only infer"))
        return Caller(token.name, operates=operates, classes=token.classes, has_token=True)


def _bearer(context: _Context) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == "authorization":
            scheme, _, token = str(value).partition(" ")
            return token.strip() if scheme.lower() == "bearer" else None
    return None


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
