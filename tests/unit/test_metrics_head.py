"""What the metrics server takes for a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime_cache.metrics.http import Request, parse_head

NOTHING = Request("", "")


@pytest.mark.parametrize(
    ("head", "request_"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", Request("GET", "/metrics")),
        (b"HEAD /health?x=1 HTTP/1.0\r\n\r\n", Request("HEAD", "/health")),
        (b"GET /%2e%2e HTTP/1.1\r\n\r\n", Request("GET", "/%2e%2e")),
        (b"GET http://x/metrics HTTP/1.1\r\n\r\n", NOTHING),
        (b"GET /metrics HTTP/2\r\n\r\n", NOTHING),
        (b"GET /metrics\r\n\r\n", NOTHING),
        (b"", NOTHING),
    ],
)
def test_the_request_line(head: bytes, request_: Request) -> None:
    assert parse_head(head) == request_


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_none(content: bytes) -> None:
    request = parse_head(content)
    assert request == NOTHING or (request.path.startswith("/") and "?" not in request.path)
