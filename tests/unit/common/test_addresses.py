"""Addresses of the form host:port."""

import pytest

from ballast.common.addresses import is_address, join_address, split_address


@pytest.mark.parametrize(("host", "port"), [("a.b", 1), ("10.0.0.7", 65535), ("::1", 50051), ("fd00::7", 9)])
def test_an_address_is_taken_apart_as_it_was_composed(host: str, port: int) -> None:
    address = join_address(host, port)
    assert is_address(address)
    assert split_address(address) == (host, port)
    assert join_address(f"[{host}]", port) == address or ":" not in host


@pytest.mark.parametrize("text", ["", "a", "a:", ":5", "a:0", "a:65536", "a:-1", "::1:50051", "fd00::7", "a:٣"])
def test_other_texts_are_no_addresses(text: str) -> None:
    assert not is_address(text)


def test_names_for_the_resolver_of_grpc_are_addresses() -> None:
    assert is_address("dns:///dispatchers:50051")
