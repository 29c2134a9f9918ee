"""Addresses of dispatchers: host:port, comma-separated."""

import os
from collections.abc import Sequence

from ballast.common.errors import InvalidRequest

_DEFAULT = "127.0.0.1:50051"


def default_address() -> str:
    """The value of BALLAST_ADDRESS; if unset, the default port on this machine."""
    return os.environ.get("BALLAST_ADDRESS") or _DEFAULT


def checked_address(address: str) -> str:
    """Return the address. Raises InvalidRequest if it is not host:port."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
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
