"""`metrics.listen`: what it may be, and what a wrong one is told."""

from __future__ import annotations

import pytest

from runtime_cache import options
from runtime_cache.errors import ConfigError
from runtime_cache.metrics.address import Address, parse_listen


@pytest.mark.parametrize(
    ("text", "address", "is_loopback"),
    [
        ("127.0.0.1:9464", Address("127.0.0.1", 9464), True),
        ("localhost:0", Address("127.0.0.1", 0), True),
        ("[::1]:65535", Address("::1", 65535), True),
        ("0.0.0.0:9464", Address("0.0.0.0", 9464), False),
        ("[::]:9464", Address("::", 9464), False),
        ("192.0.2.7:80", Address("192.0.2.7", 80), False),
    ],
)
def test_an_address_and_a_port(text: str, address: Address, is_loopback: bool) -> None:
    found = parse_listen(text)
    assert (found, found.is_loopback) == (address, is_loopback)
    assert str(found) == text.replace("localhost", "127.0.0.1")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (":9464", "names no address"),
        ("*:9464", "names no address"),
        ("9464", "is not an address and a port"),
        ("127.0.0.1", "is not an address and a port"),
        ("127.0.0.1:", "is not an address and a port"),
        ("127.0.0.1:-1", "is not an address and a port"),
        ("127.0.0.1:٣", "is not an address and a port"),
        ("::1:9464", "is not an address and a port"),
        ("http://127.0.0.1:9464", "is not an address and a port"),
        ("127.0.0.1:65536", "no port 65536"),
        ("metrics.example:9464", '"metrics.example" is not an IP address'),
        ("127.0.0.1\n:9464", "is not an IP address"),
        ("[::1%lo]x:1", "is not an address and a port"),
    ],
)
def test_anything_else_is_told_what_to_write(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9464") as caught:
        parse_listen(text)
    assert why in str(caught.value)


def test_a_wrong_one_stops_the_start() -> None:
    with pytest.raises(ConfigError, match=r'metrics\.listen: ":1" names no address'):
        options.load(env={}, flags={"metrics.listen": ":1"})
