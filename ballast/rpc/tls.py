"""TLS for gRPC. A process has one folder with three files, named as by Kubernetes and cert-manager:

tls.crt  its certificate, with the chain up to the CA
tls.key  its private key
ca.crt   the CA of the cluster, which must have signed the peer's certificate

A certificate contains the role of its process, as the name ROLE.ballast and as the URI ballast://ROLE/ID (`*` as ID:
every process of that role). A client verifies the role of the server instead of its host, so certificates do not depend
on where services run; only a dispatcher's must name its hosts, for clients outside the cluster.
"""

import ssl
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any, cast

import grpc

from ballast.common.errors import ConfigError

CERTIFICATE, KEY, CA = "tls.crt", "tls.key", "ca.crt"
_LOOK_S = 1.0  # interval of checks for new files
_CALL_WITHIN_S = 15.0  # a handshake without a call for this long has failed; longer than its own timeout
_MOST_CONNECTIONS = 1 << 16  # limit on remembered connections


class TlsFolder:
    """A process's certificate, key and CA. When the files are replaced, new connections use the new ones."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if one of the files cannot be read or is invalid."""
        self.path = path
        self._channel: tuple[list[tuple[int, int]], grpc.ChannelCredentials] | None = None
        for name, sign in ((CERTIFICATE, b"CERTIFICATE"), (KEY, b"PRIVATE KEY"), (CA, b"CERTIFICATE")):
            if sign not in _read(path / name):
                raise ConfigError(str(path / name), "holds no PEM block of that kind; `ballast certs` makes the files")

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Client credentials from the current files, or from the previous ones if the current ones cannot be read."""
        try:
            stamps = self.stamps()
            if self._channel is None or stamps != self._channel[0]:
                read = self._read_all()
                self._channel = stamps, grpc.ssl_channel_credentials(read[CA], read[KEY], read[CERTIFICATE])
        except (OSError, ConfigError):
            if self._channel is None:
                raise
        return self._channel[1]

    def stamps(self) -> list[tuple[int, int]]:
        """(modification time in ns, inode) of each file."""
        stats = [(self.path / name).stat() for name in (CERTIFICATE, KEY, CA)]
        return [(stat.st_mtime_ns, stat.st_ino) for stat in stats]

    def left_s(self) -> float:
        """Seconds until the certificate expires; negative if it has expired.

        Raises:
            ConfigError: the certificate cannot be read.
        """
        return expires_unix_s(self.path / CERTIFICATE) - time.time()

    def server_credentials(self, *, asks_clients: bool) -> grpc.ServerCredentials:
        """Server credentials. `asks_clients`: clients must have a certificate signed by the CA."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            cast(Any, _Renewal(self).fetch),  # Any: its type omits that None is allowed
            require_client_authentication=asks_clients,
        )

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        read = self._read_all()
        return grpc.ssl_server_certificate_configuration([(read[KEY], read[CERTIFICATE])], read[CA])

    def _read_all(self) -> dict[str, bytes]:
        return {name: _read(self.path / name) for name in (CERTIFICATE, KEY, CA)}


class Handshakes:
    """Counts failed TLS handshakes: those not followed by a call.

    gRPC reports neither failures nor their causes (certificate of another CA, no certificate, no TLS), but it calls
    `_Renewal.fetch` at the beginning of each handshake.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._begun_s = deque[float]()  # start times of handshakes not yet followed by a call
        self._known = OrderedDict[str, None]()  # connections with calls
        self._failed_count = 0
        self._lock = Lock()  # handshakes begin in gRPC's threads

    def begins(self) -> None:
        with self._lock:
            self._begun_s.append(self._now_s())
            self._expire()

    def has_call(self, connection: str) -> None:
        if connection in self._known:
            return
        with self._lock:
            self._known[connection] = None
            if len(self._known) > _MOST_CONNECTIONS:
                self._known.popitem(last=False)
            if self._begun_s:
                self._begun_s.pop()  # the latest: new connections must not renew the time of an older, failed handshake

    @property
    def failed_count(self) -> int:
        """Number of handshakes that no call followed in time."""
        with self._lock:
            self._expire()
            return self._failed_count

    def _expire(self) -> None:
        latest_s = self._now_s() - _CALL_WITHIN_S
        while self._begun_s and (self._begun_s[0] < latest_s or len(self._begun_s) > _MOST_CONNECTIONS):
            self._begun_s.popleft()
            self._failed_count += 1


HANDSHAKES = Handshakes()  # handshakes of all servers in this process


class _Renewal:
    """Gives gRPC the current certificate at every handshake; gRPC calls it in its own threads."""

    def __init__(self, folder: TlsFolder) -> None:
        self._folder = folder
        self._known = folder.stamps()
        self._evaluated_at_s = time.monotonic()

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """The new configuration if the files have changed; None if they have not, or cannot be read."""
        HANDSHAKES.begins()
        if time.monotonic() - self._evaluated_at_s < _LOOK_S:
            return None
        self._evaluated_at_s = time.monotonic()
        try:
            stamps = self._folder.stamps()
            if stamps == self._known:
                return None
            configuration = self._folder._configuration()  # pyright: ignore[reportPrivateUsage] - of the same file
        except (OSError, ConfigError):
            return None
        self._known = stamps
        return configuration


def expires_unix_s(certificate: Path) -> float:
    """Expiry time of the first certificate in a file, in seconds since 1970.

    Raises:
        ConfigError: the file contains no readable certificate.
    """
    decode = cast(Callable[[str], dict[str, Any]], ssl._ssl._test_decode_cert)  # pyright: ignore
    try:
        return float(ssl.cert_time_to_seconds(decode(str(certificate))["notAfter"]))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(str(certificate), f"holds no certificate that can be read: {error}") from error


def trusting(ca_file: Path | None) -> grpc.ChannelCredentials:
    """Credentials of a client without a certificate. `ca_file`: CA of the servers; None: gRPC's built-in CAs."""
    return grpc.ssl_channel_credentials(None if ca_file is None else _read(ca_file))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
