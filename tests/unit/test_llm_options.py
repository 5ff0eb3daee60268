"""What an embedded model is opened with: names, defaults, limits, and the device."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from runtime_cache.config import CacheConfig, Config, EngineConfig
from runtime_cache.errors import ConfigError
from runtime_cache.llm.options import PrefixCachingConfig, embedded_config


@pytest.fixture(autouse=True)
def no_device_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RTCACHE_DEVICE_DEVICE", raising=False)


def config(caching: Any = None, **options: object) -> Config:
    return embedded_config("b", "sim:0", caching, options)


def test_the_names_of_atb() -> None:
    caching = PrefixCachingConfig(
        enable=True,
        max_prefix_length=4096,
        cache_capacity=48,
        auto_detect=True,
        eviction_policy="lru",
        max_cached_prefixes=64,
    )
    assert caching == PrefixCachingConfig(cache_capacity=48)


def test_the_defaults_are_the_daemons_but_for_two() -> None:
    caching, daemon = PrefixCachingConfig(), CacheConfig()
    names = PrefixCachingConfig.__struct_fields__
    assert sorted(names) == sorted(CacheConfig.__struct_fields__)
    differ = {name for name in names if getattr(caching, name) != getattr(daemon, name)}
    assert differ == {"max_prefix_length", "max_cached_prefixes"}


def test_it_is_frozen() -> None:
    with pytest.raises(AttributeError):
        PrefixCachingConfig().enable = False  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("enable", False, 1),
        ("auto_detect", False, "yes"),
        ("max_prefix_length", 1, 0),
        ("max_prefix_length", None, 2.5),
        ("cache_capacity", 0.001, 0),
        ("cache_capacity", None, "48GB"),
        ("cache_capacity", 48, float("inf")),
        ("max_cached_prefixes", 1, 0),
        ("eviction_policy", "slru", "fifo"),
        ("low_watermark_mb", 0, -1),
        ("low_watermark_mb", 1.5, float("nan")),
        ("high_watermark_mb", 256, 255.9),  # below low_watermark_mb
        ("block_size", 1, 0),
        ("block_size", 4096, 4097),
        ("max_kept_percent", 100, 101),
        ("deterministic", True, None),
    ],
)
def test_each_value_is_checked_and_named(name: str, good: Any, bad: Any) -> None:
    assert getattr(PrefixCachingConfig(**{name: good}), name) == good
    with pytest.raises(ConfigError, match=f"^PrefixCachingConfig: .*{name}"):
        PrefixCachingConfig(**{name: bad})


def test_all_faults_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        PrefixCachingConfig(block_size=0, cache_capacity=-1)
    assert "block_size = 0: Expected `int` >= 1; " in str(caught.value).replace("\n", "")
    assert "cache_capacity = -1: Expected `float" in str(caught.value)


def test_an_unknown_name_is_a_typing_error() -> None:
    with pytest.raises(TypeError, match="max_prefix_len"):
        PrefixCachingConfig(max_prefix_len=3)  # type: ignore[call-arg]


def test_the_configuration_is_the_daemons() -> None:
    caching = PrefixCachingConfig(block_size=8)
    made = config(
        caching,
        engine_max_running=4,
        device_step_timeout_ms=5,
        sim_threads=2,
        sim_memory="1GiB",
        model_verify=False,
        log_level="info",
    )
    assert (made.model.bundle, made.model.verify, made.device.device) == ("b", False, "sim:0")
    assert (made.engine.max_running, made.device.step_timeout_ms) == (4, 5)
    assert (made.sim.threads, made.sim.memory, made.log.level) == (2, "1GiB", "info")
    assert made.cache is caching


def test_the_defaults() -> None:
    made = config()
    assert made.cache == PrefixCachingConfig()
    assert made.log.level == "warning"
    assert made.engine == EngineConfig(default_max_tokens=512)


@pytest.mark.parametrize("max_tokens", [None, 7])
def test_an_answers_length_is_the_programs_to_say(max_tokens: int | None) -> None:
    made = config(engine_default_max_tokens=max_tokens)
    assert made.engine.default_max_tokens == max_tokens


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"engine_max_runing": 1}, "no keyword 'engine_max_runing'; did you mean 'engine_max_run"),
        ({"cache_enable": True}, "no keyword 'cache_enable'"),
        ({"device_device": "sim:0"}, "no keyword 'device_device'"),
        ({"ipc_endpoint": "x"}, "no keyword 'ipc_endpoint'"),
    ],
)
def test_an_unknown_keyword(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        config(**options)


@pytest.mark.parametrize(
    ("caching", "options", "sentence"),
    [
        (None, {"engine_max_running": 0}, "LLM: engine_max_running = 0: Expected `int` >= 1"),
        (None, {"sim_memory": "much"}, 'LLM: sim.memory: "much" is not a size'),
        (None, {"log_level": "loud"}, "LLM: log_level = 'loud'"),
        ({"enable": True}, {}, "prefix_caching: expected a PrefixCachingConfig, got {'enable'"),
    ],
)
def test_a_wrong_value(caching: Any, options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        config(caching, **options)


def test_the_device_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTCACHE_DEVICE_DEVICE", "sim:0")
    assert embedded_config("b", None, None, {}).device.device == "sim:0"
    with pytest.raises(ConfigError, match="device 'gpu' is unknown"):
        embedded_config("b", "gpu", None, {})


@pytest.mark.parametrize("device", [None, "npu:0"])
def test_without_a_card_one_is_told_how_to_do_without(
    monkeypatch: pytest.MonkeyPatch, device: str | None
) -> None:
    """The software device is never taken unasked."""
    monkeypatch.setitem(sys.modules, "acl", None)
    with pytest.raises(ConfigError) as caught:
        embedded_config("b", device, None, {})
    text = str(caught.value)
    assert text.startswith("device 'npu:0': pyACL cannot be imported: ")
    assert 'LLM(..., device="sim:0") or RTCACHE_DEVICE_DEVICE=sim:0' in text


def test_an_empty_variable_names_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTCACHE_DEVICE_DEVICE", "")
    monkeypatch.setitem(sys.modules, "acl", None)
    with pytest.raises(ConfigError, match="device 'npu:0'"):
        embedded_config("b", None, None, {})
