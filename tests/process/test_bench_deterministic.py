"""`rtcache-bench deterministic` as a process; nothing is timed here."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.rtcached import run

MEASURES = ("cold_ttft_ms", "hit_ttft_ms", "alone_token_ms", "together_token_ms")


def test_deterministic(null_bundle: Path):
    sizes = ("--runs", "2", "--shared-tokens", "100", "--own-tokens", "10")
    answers = ("--answer-tokens", "5", "--at-once", "3", "--json")
    bundle = ("--bundle", str(null_bundle))
    ended = run("tools.bench.main", "deterministic", *bundle, *sizes, *answers)
    assert ended.code == 0
    assert "ceiling: a cost of 1" in ended.complaint
    (line,) = ended.out.splitlines()
    result = json.loads(line)
    measured = {f"{n}_{kind}" for n in MEASURES for kind in ("normal", "deterministic", "cost")}
    facts = {"benchmark", "bundle", "commit", "device", "runs", "version", "at_once"}
    assert set(result) == facts | measured
    assert all(result[name] > 0 for name in measured)
    assert (result["runs"], result["at_once"]) == (2, 3)
