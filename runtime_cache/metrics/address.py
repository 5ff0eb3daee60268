"""Where metrics are served: `metrics.listen`. Pure."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

from runtime_cache.errors import ConfigError

_FORM = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^:\[\]]*):(?P<port>\d{1,5})", re.ASCII)
_EXAMPLE = 'write for example "127.0.0.1:9464"'


class Address(NamedTuple):
    """A checked address.

    Attributes:
        host: an IP address, without brackets.
        port: 0 for one that the system chooses.
    """

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this host reaches it."""
        return ipaddress.ip_address(self.host).is_loopback

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listen(text: str) -> Address:
    """`"127.0.0.1:9464"`, `"[::1]:9464"`, `"localhost:9464"` → an address.

    A name is not looked up, and no address is not every address: who wants that names 0.0.0.0.

    Raises:
        ConfigError: it is none; the sentence says why.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise ConfigError(f'"{text}" is not an address and a port; {_EXAMPLE}')
    host, port = match["host"].strip("[]"), int(match["port"])
    if port > 65535:
        raise ConfigError(f"there is no port {port}; {_EXAMPLE}")
    if host in ("", "*"):
        raise ConfigError(
            f'"{text}" names no address: {_EXAMPLE}, or "0.0.0.0:{port}" for whoever can reach '
            f"this host"
        )
    if host == "localhost":
        host = "127.0.0.1"
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(f'"{host}" is not an IP address, nor localhost; {_EXAMPLE}') from None
    return Address(host, port)
