"""Scripts of faults from a file: what they do, and how wrong ones are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime_cache.aclsim as acl
from runtime_cache.aclsim import faults, inspect, settings
from runtime_cache.aclsim.fault_script import read_script
from runtime_cache.device.select import load_acl
from runtime_cache.errors import ConfigError
from tests.support.aclsim import fresh_process, ok, upload


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    inspect.reset()
    yield
    inspect.reset()


def script(directory: Path, *entries: dict[str, Any], **document: Any) -> str:
    path = directory / "faults.json"
    path.write_text(json.dumps({"faults": list(entries)} | document))
    return str(path)


def malloc_codes(count: int) -> list[int]:
    return [acl.rt.malloc(64, 0)[1] for _ in range(count)]


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ({}, [7, 0, 0, 0, 0, 0]),
        ({"call": 3}, [0, 0, 7, 0, 0, 0]),
        ({"every": 2}, [0, 7, 0, 7, 0, 7]),
        ({"every": 1}, [7, 7, 7, 7, 7, 7]),
        ({"probability": 1}, [7, 7, 7, 7, 7, 7]),
    ],
)
def test_when_a_fault_strikes(tmp_path: Path, when: dict[str, Any], expected: list[int]) -> None:
    path = script(tmp_path, {"function": "acl.rt.malloc", "code": 7, **when})
    with fresh_process(faults=path):
        assert malloc_codes(6) == expected


def test_chance_is_repeatable_and_the_seed_decides(tmp_path: Path) -> None:
    entry = {"function": "acl.rt.malloc", "code": 7, "probability": 0.25}
    found = []
    for seed in (1, 1, 2):
        with fresh_process(faults=script(tmp_path, entry, seed=seed)):
            found.append(malloc_codes(200))
    assert found[0] == found[1] != found[2]
    assert all(25 <= codes.count(7) <= 75 for codes in found)


def test_several_faults_count_each_for_itself(tmp_path: Path) -> None:
    entries = [{"function": "acl.rt.malloc", "call": call, "code": call} for call in (1, 3)]
    with fresh_process(faults=script(tmp_path, *entries)):
        assert malloc_codes(4) == [1, 0, 3, 0]


def test_work_that_fails_at_its_turn(tmp_path: Path) -> None:
    entry = {"function": "acl.rt.memset_async", "when": "run", "call": 2, "code": 507015}
    with fresh_process(faults=script(tmp_path, entry)):
        stream = ok(acl.rt.create_stream())
        ptr = upload(np.zeros(64, np.uint8))
        for _ in range(2):
            ok(acl.rt.memset_async(ptr, 64, 1, 64, stream))
        assert acl.rt.synchronize_stream(stream) == 507015
        assert acl.rt.synchronize_stream(stream) == 0


def test_it_is_read_at_init_and_begins_anew_with_each(tmp_path: Path) -> None:
    path = script(tmp_path, {"function": "acl.rt.malloc", "call": 2, "code": 7})
    with fresh_process(faults=path):
        kept = faults.inject("acl.rt.malloc_host", call=2, code=9)
        assert malloc_codes(1) == [0]
        for _ in range(2):
            ok(acl.rt.reset_device(0))
            ok(acl.finalize())
            ok(acl.init())
            ok(acl.rt.set_device(0))
            assert malloc_codes(3) == [0, 7, 0]
        assert not kept.has_fired
        assert [acl.rt.malloc_host(64)[1] for _ in range(2)] == [0, 9]


def test_the_environment_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = script(tmp_path, {"function": "acl.rt.malloc", "code": 7})
    monkeypatch.setenv("RTCACHE_ACLSIM_FAULTS", path)
    with fresh_process():
        assert malloc_codes(2) == [7, 0]


MALLOC = {"function": "acl.rt.malloc", "code": 7}


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"code": 7}, "fault 2: it names no function"),
        ({"function": "acl.rt.maloc", "code": 7}, "acl.rt.maloc is no function"),
        (MALLOC | {"when": "run"}, "acl.rt.malloc is no function that can fail at its run"),
        (MALLOC | {"when": "later"}, "when is call or run, not 'later'"),
        (MALLOC | {"call": 0}, "one of call"),
        (MALLOC | {"call": 1, "every": 2}, "one of call"),
        (MALLOC | {"call": 1.5}, "call is an integer, not 1.5"),
        (MALLOC | {"call": True}, "call is an integer, not True"),
        (MALLOC | {"every": -1}, "count from 1"),
        (MALLOC | {"probability": 1.01}, "within 0 and 1"),
        (MALLOC | {"probability": "often"}, "probability is a number, not 'often'"),
        ({"function": "acl.rt.malloc"}, "a code"),
        (MALLOC | {"delay_ms": -1}, "a code"),
        (MALLOC | {"code": 1 << 31}, "31 bits"),
        (MALLOC | {"delay_ms": (1 << 31) - 1, "hang_ms": 1}, "31 bits"),
        (MALLOC | {"function": 3}, "function is a name, not 3"),
        (MALLOC | {"cod": 7}, "unknown: cod; known: call, code, delay_ms"),
        ([], "a fault is not an object"),
    ],
)
def test_a_wrong_fault_is_refused_with_its_place(
    tmp_path: Path, entry: dict[str, Any], sentence: str
) -> None:
    path = script(tmp_path, MALLOC, entry)
    with pytest.raises(ValueError, match="fault 2: ") as caught:
        read_script(path)
    assert str(caught.value).startswith(f"fault script {path}: ")
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[" * 100_000, "recursion"),
        ("{", "Expecting property name"),
        ("[]", "the script is not an object"),
        ('{"faults": {}}', "`faults` is a list"),
        ('{"seed": "x"}', "`seed` an integer"),
        ('{"fault": []}', "unknown: fault; known: faults, seed"),
    ],
)
def test_a_wrong_script_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "faults.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="fault script") as caught:
        read_script(str(path))
    assert sentence in str(caught.value)


def test_a_script_that_cannot_be_used_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = str(tmp_path / "none.json")
    with pytest.raises(ConfigError, match=r"fault script .*none\.json: .*No such file"):
        load_acl("sim:0", {"faults": missing})
    monkeypatch.setenv("RTCACHE_ACLSIM_FAULTS", missing)
    with pytest.raises(ValueError, match="No such file"):
        settings.configure()
    monkeypatch.undo()
    assert settings.configure().faults == ""


def test_a_script_that_is_gone_at_init_leaves_acl_closed(tmp_path: Path) -> None:
    path = script(tmp_path, MALLOC)
    settings.configure(faults=path)
    Path(path).unlink()
    with pytest.raises(ValueError, match="No such file"):
        acl.init()
    assert acl.rt.set_device(0) == 100001
    settings.configure()
    assert acl.init() == 0
