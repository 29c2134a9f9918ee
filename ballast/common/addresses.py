"""Addresses of the form host:port, in which an IPv6 address is in brackets: [::1]:50051."""

import os
from collections.abc import Sequence

from ballast.common.errors import InvalidRequest

_DEFAULT = "127.0.0.1:50051"


def default_address() -> str:
    """The value of BALLAST_ADDRESS; if unset, the default port on this machine."""
    return os.environ.get("BALLAST_ADDRESS") or _DEFAULT


def join_address(host: str, port: int) -> str:
    """Return host:port. An IPv6 address may be given with or without its brackets."""
    host = host.strip("[]")
    return f"[{host}]:{port}" if is_ipv6(host) else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port of a valid address."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_address(text: str) -> bool:
    """True if the text is host:port, with brackets around an IPv6 address. The host may be a name for gRPC's resolver:
    dns:///NAME.
    """
    host, _, port = text.rpartition(":")
    is_host = bool(host) and (":" not in host or "/" in host or (host[0] == "[" and host[-1] == "]"))
    return is_host and port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 1 << 16


def is_ipv6(host: str) -> bool:
    """True if `host` is an IPv6 address, with or without brackets."""
    return ":" in host


def checked_address(address: str) -> str:
    """Return the address. Raises InvalidRequest if it is not host:port."""
    if not is_address(address):
        raise InvalidRequest("address", f"must be host:port, got {address!r}")
    return address


def split_addresses(addresses: str | Sequence[str]) -> tuple[str, ...]:
    """Split a comma-separated list of addresses.

    Raises:
        InvalidRequest: there is none, or one is not host:port.
    """
    given = addresses.split(",") if isinstance(addresses, str) else addresses
    found = tuple(checked_address(address.strip()) for address in given)
    if not found:
        raise InvalidRequest("address", "at least one host:port is needed")
    return found
