"""A client's credentials and its verification of servers: token, TLS, and operators' certificates."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import grpc
import grpc.aio

from ballast.common.credentials import CA_FILE, TLS, TLS_DIR, TOKEN
from ballast.common.errors import ConfigError
from ballast.rpc.channel import bearing, open_channel

# TLS, paths and address checks are slow to import and therefore imported where they are needed.
if TYPE_CHECKING:
    from pathlib import Path

_SWITCH = {"1": True, "0": False, "": None}


@dataclass(frozen=True, slots=True)
class Access:
    """A client's credentials, and how it verifies servers.

    Attributes:
        token: The token that is sent with every call to a dispatcher.
        ca_file: CA that must have signed the dispatchers' certificates. If set, calls use TLS.
        tls: True: TLS, with this machine's CAs if there is no `ca_file`. False: no TLS, even for the token. None: TLS
            if there is a `ca_file`.
        tls_dir: Folder with an operator's certificate (`ballast certs`), for calls to services other than dispatchers.
    """

    token: str | None = None
    ca_file: "Path | None" = None
    tls: bool | None = None
    tls_dir: "Path | None" = None

    @classmethod
    def of(cls, token: str | None = None, ca_file: "str | Path | None" = None, tls: bool | None = None) -> Self:
        """Make an `Access` from arguments; those that are None are read from the environment: BALLAST_TOKEN,
        BALLAST_CA_FILE, BALLAST_TLS (1 or 0). `tls_dir` is always BALLAST_TLS_DIR. An empty token means none.

        Raises:
            ConfigError: BALLAST_TLS has another value, `tls` contradicts `ca_file`, or the token has a character that
                is invalid in headers.
        """
        switch = os.environ.get(TLS, "")
        if switch not in _SWITCH:
            raise ConfigError(TLS, f"must be 1 or 0, got {switch!r}")
        tls = _SWITCH[switch] if tls is None else tls
        file, folder = ca_file or os.environ.get(CA_FILE), os.environ.get(TLS_DIR)
        if tls is False and ca_file is not None:
            raise ConfigError("ca_file", "is given, so calls must use TLS")
        return cls(
            token=_checked((os.environ.get(TOKEN, "") if token is None else token).strip()) or None,
            ca_file=_path(file) if tls is not False else None,
            tls=tls,
            tls_dir=_path(folder),
        )

    @property
    def how(self) -> str:
        """Describe how this client connects, for error messages, because the server must be configured accordingly."""
        if self.ca_file is not None:
            return f"with TLS and a certificate of {self.ca_file} for this address"
        return "with TLS and a certificate for this address" if self.tls else "without TLS"

    def open(self, address: str) -> grpc.aio.Channel:
        """Open a channel to a dispatcher, or to all dispatchers behind a host name.

        Raises:
            ConfigError: the CA cannot be read, or a token would be sent to another machine unencrypted.
        """
        if self.ca_file is not None or self.tls:
            from ballast.rpc.tls import trusting

            return open_channel(address, trusting(self.ca_file), to_all=True)
        if self.token is not None and self.tls is None and not _is_here(address):
            why = f"would be sent to {address} unencrypted; give --ca-file FILE, {TLS}=1, or {TLS}=0 to allow it"
            raise ConfigError("token", why)
        return open_channel(address, to_all=True)

    def bearing(self, channel: grpc.aio.Channel) -> grpc.aio.Channel:
        """A wrapper of `channel` whose stubs send the token with each call."""
        return bearing(channel, self.token)

    def open_peer(self, address: str, role: str) -> grpc.aio.Channel:
        """Open a channel to a worker, planner or monitor (`role`)."""
        if self.tls_dir is None:
            return open_channel(address, None, role)
        from ballast.rpc.tls import TlsFolder

        return open_channel(address, TlsFolder(self.tls_dir).channel_credentials(), role)

    def open_sync(self, address: str, role: str) -> grpc.Channel:
        """Open a synchronous channel to a service of this role. Its calls do not send the token."""
        if self.tls_dir is None and (role != "dispatcher" or self.ca_file is None):
            return grpc.insecure_channel(address)
        from ballast.rpc.tls import TlsFolder, trusting

        credentials = trusting(self.ca_file) if self.tls_dir is None else TlsFolder(self.tls_dir).channel_credentials()
        options = (("grpc.ssl_target_name_override", f"{role}.ballast"),)
        return grpc.secure_channel(address, credentials, options=options)


def _checked(token: str) -> str:
    if not (token.isascii() and token.isprintable()):
        raise ConfigError("token", f"must have only printable ASCII characters ({TOKEN})")
    return token


def _path(name: "str | Path | None") -> "Path | None":
    if not name:
        return None
    from pathlib import Path

    return Path(name)


def _is_here(address: str) -> bool:
    import ipaddress

    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
