"""The configuration: four places, one set of names, all faults at once."""

import argparse
import re
from pathlib import Path

import pytest

from runtime_cache import config
from runtime_cache.errors import ConfigError

ROOT = Path(__file__).parents[2]


def faults(**kwargs: object) -> str:
    with pytest.raises(ConfigError) as caught:
        config.load(**{"env": {}, **kwargs})  # type: ignore[arg-type]
    return str(caught.value)


def test_defaults_name_no_device() -> None:
    loaded = config.load(env={})
    assert loaded.config.device.device == ""
    assert set(loaded.origins.values()) == {"default"}


def test_later_places_win(tmp_path: Path) -> None:
    file = tmp_path / "rtcached.toml"
    file.write_text("[cache]\nblock_size = 16\nlow_watermark_mb = 1\n[engine]\nmax_waiting = 5\n")
    env = {"RTCACHE_CACHE_BLOCK_SIZE": "32", "RTCACHE_ENGINE_MAX_WAITING": "6"}
    loaded = config.load(str(file), env=env, flags={"engine.max_waiting": "7"})
    assert loaded.config.cache.low_watermark_mb == 1
    assert loaded.config.cache.block_size == 32
    assert loaded.config.engine.max_waiting == 7
    assert loaded.origins["cache.low_watermark_mb"] == str(file)
    assert loaded.origins["cache.block_size"] == "environment RTCACHE_CACHE_BLOCK_SIZE"
    assert loaded.origins["engine.max_waiting"] == "flag --engine-max-waiting"


def test_all_faults_are_reported_together_with_their_places(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[cach]\n[cache]\nblok_size = 1\nblock_size = 0\n[sim]\nmemory = 'much'\n")
    text = faults(path=str(file), env={"RTCACHE_SIM_MEMROY": "1"}, flags={"log.level": "loud"})
    assert "unknown section [cach]" in text
    assert "unknown key cache.blok_size; did you mean cache.block_size?" in text
    assert "cache.block_size = 0: Expected `int` >= 1" in text
    assert "environment RTCACHE_SIM_MEMROY: no such option" in text
    assert "flag --log-level: log.level = 'loud'" in text
    assert '"much" is not a size' in text
    assert text.count("\n  - ") == 6


def test_values_that_convert_are_checked_for_their_meaning() -> None:
    assert '"much" is not a size' in faults(flags={"sim.memory": "much"})
    tcp = {"ipc.endpoint": "tcp://127.0.0.1:5555"}
    assert "ipc.admin_endpoint: must be given" in faults(flags=tcp)
    same = {"ipc.endpoint": "ipc://a", "ipc.admin_endpoint": "ipc://a"}
    assert "must differ" in faults(flags=same)


@pytest.mark.parametrize("edge", [("1023", False), ("1024", True), ("67108865", False)])
def test_limits_hold_at_their_edges(edge: tuple[str, bool]) -> None:
    text, is_legal = edge
    flags = {"ipc.max_message_bytes": text}
    if is_legal:
        assert config.load(env={}, flags=flags).config.ipc.max_message_bytes == int(text)
    else:
        assert "ipc.max_message_bytes" in faults(flags=flags)


@pytest.mark.parametrize("text", ["inf", "-inf", "nan"])
def test_numbers_are_finite(text: str) -> None:
    path = "cache.low_watermark_mb"
    assert f"flag --cache-low-watermark-mb: {path} = " in faults(flags={path: text})


def test_toml_is_typed_and_text_is_parsed(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[cache]\nblock_size = "16"\n')
    assert "Expected `int`, got `str`" in faults(path=str(file))
    assert config.load(env={"RTCACHE_CACHE_ENABLE": "false"}).config.cache.enable is False


def test_empty_text_unsets_an_optional_value() -> None:
    loaded = config.load(env={"RTCACHE_ENGINE_MAX_RUNNING": ""})
    assert loaded.config.engine.max_running is None


def test_unreadable_and_invalid_files_are_named(tmp_path: Path) -> None:
    assert "cannot read configuration" in faults(path=str(tmp_path / "none.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text("[cache\n")
    assert f"{broken} is not valid TOML" in faults(path=str(broken))


def test_other_programs_variables_are_left_alone() -> None:
    assert config.load(env={"RTCACHE_ENDPOINT": "ipc://x", "HOME": "/"}).config == config.Config()


def test_the_reference_file_is_what_the_fields_say() -> None:
    assert (ROOT / "rtcached.toml").read_text() == config.reference_toml()


def test_the_reference_file_uncommented_is_a_valid_configuration(tmp_path: Path) -> None:
    file = tmp_path / "all.toml"
    file.write_text(re.sub(r"^# ([a-z_]+ = )", r"\1", config.reference_toml(), flags=re.MULTILINE))
    loaded = config.load(str(file), env={})
    assert loaded.config == config.Config()
    assert set(loaded.origins.values()) == {str(file)}


def test_every_option_has_a_flag_and_a_meaning() -> None:
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    given = vars(parser.parse_args(["--device", "sim:0", "--cache-block-size", "8"]))
    assert given == {"device.device": "sim:0", "cache.block_size": "8"}
    assert all(option.doc for option in config.options())


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1", 1), ("2KiB", 2048), ("2kb", 2000), ("1.5GiB", 3 * 2**29), ("4 G", 4 * 10**9)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert config.parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1PiB", "1 1"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        config.parse_bytes(text)
