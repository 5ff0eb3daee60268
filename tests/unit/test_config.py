"""The configuration: four places, one set of names, all faults at once."""

import argparse
import json
import re
from pathlib import Path

import pytest

from runtime_cache import options
from runtime_cache.config import Config, TenantConfig, endpoints_of, parse_bytes
from runtime_cache.errors import ConfigError

ROOT = Path(__file__).parents[2]


def faults(**kwargs: object) -> str:
    with pytest.raises(ConfigError) as caught:
        options.load(**{"env": {}, **kwargs})  # type: ignore[arg-type]
    return str(caught.value)


def test_defaults_name_no_device() -> None:
    loaded = options.load(env={})
    assert loaded.config.device.device == ""
    assert set(loaded.origins.values()) == {"default"}


def test_later_places_win(tmp_path: Path) -> None:
    file = tmp_path / "rtcached.toml"
    file.write_text("[cache]\nblock_size = 16\nlow_watermark_mb = 1\n[engine]\nmax_waiting = 5\n")
    env = {"RTCACHE_CACHE_BLOCK_SIZE": "32", "RTCACHE_ENGINE_MAX_WAITING": "6"}
    loaded = options.load(str(file), env=env, flags={"engine.max_waiting": "7"})
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
    level = "flag --log-level: log.level = 'loud': expected one of debug, info, warning, error"
    assert level in text
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
        assert options.load(env={}, flags=flags).config.ipc.max_message_bytes == int(text)
    else:
        assert "ipc.max_message_bytes" in faults(flags=flags)


@pytest.mark.parametrize("text", ["inf", "-inf", "nan"])
def test_numbers_are_finite(text: str) -> None:
    path = "cache.low_watermark_mb"
    assert f"flag --cache-low-watermark-mb: {path} = " in faults(flags={path: text})


#: Path, values that are taken, values that are not.
EDGES = [
    ("cache.block_size", ["1", "4096"], ["0", "4097"]),
    ("cache.cache_capacity", ["0.000001", ""], ["0", "-1"]),
    ("cache.auto_detect", ["true", "false", "0", "1"], ["maybe", ""]),
    ("cache.max_prefix_length", ["1", ""], ["0", "-1", "1.5"]),
    ("cache.max_cached_prefixes", ["1", ""], ["0", "-1"]),
    ("cache.eviction_policy", ["lru", "slru"], ["LRU", "fifo", ""]),
    ("cache.low_watermark_mb", ["0", "256"], ["-0.1"]),
    ("cache.high_watermark_mb", ["256", "256.5", ""], ["-1", "255.9"]),
    ("device.step_timeout_ms", ["1", "600000"], ["0", "-1"]),
    ("device.hang_limit_ms", ["120000", "120001", ""], ["0", "119999"]),
    ("engine.on_failed_step", ["recompute", "fail"], ["retry", ""]),
    ("cache.max_kept_percent", ["0", "100"], ["-1", "101", "0.5"]),
    ("cache.deterministic", ["true"], ["2"]),
    ("engine.max_overtakes", ["0", "1"], ["-1"]),
    ("device.low_memory_mb", ["0"], ["-1"]),
    ("device.memory_check_s", ["0.1"], ["0", "-1"]),
]


@pytest.mark.parametrize(
    ("path", "text"), [(path, text) for path, legal, _ in EDGES for text in legal]
)
def test_values_at_the_edge_are_taken(path: str, text: str) -> None:
    assert options.load(env={}, flags={path: text}).origins[path].startswith("flag ")


@pytest.mark.parametrize(
    ("path", "text"), [(path, text) for path, _, illegal in EDGES for text in illegal]
)
def test_values_beyond_the_edge_are_refused(path: str, text: str) -> None:
    assert faults(flags={path: text}).count(path) == 1


def test_the_high_watermark_is_not_below_the_low_one() -> None:
    text = faults(flags={"cache.low_watermark_mb": "300", "cache.high_watermark_mb": "299"})
    assert "cache.high_watermark_mb: 299.0 is below cache.low_watermark_mb, 300.0" in text


def test_the_limit_of_a_hang_is_not_below_the_time_of_a_step() -> None:
    text = faults(flags={"device.step_timeout_ms": "300", "device.hang_limit_ms": "299"})
    assert "device.hang_limit_ms: 299 is below device.step_timeout_ms, 300" in text


def test_toml_is_typed_and_text_is_parsed(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[cache]\nblock_size = "16"\n')
    assert "Expected `int`, got `str`" in faults(path=str(file))
    assert options.load(env={"RTCACHE_CACHE_ENABLE": "false"}).config.cache.enable is False


def test_empty_text_unsets_an_optional_value() -> None:
    loaded = options.load(env={"RTCACHE_ENGINE_MAX_RUNNING": ""})
    assert loaded.config.engine.max_running is None


def test_unreadable_and_invalid_files_are_named(tmp_path: Path) -> None:
    assert "cannot read configuration" in faults(path=str(tmp_path / "none.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text("[cache\n")
    assert f"{broken} is not valid TOML" in faults(path=str(broken))


def test_other_programs_variables_are_left_alone() -> None:
    assert options.load(env={"RTCACHE_ENDPOINT": "ipc://x", "HOME": "/"}).config == Config()


def test_the_reference_file_is_what_the_fields_say() -> None:
    assert (ROOT / "rtcached.toml").read_text() == options.reference_toml()


def test_the_reference_file_uncommented_is_a_valid_configuration(tmp_path: Path) -> None:
    file = tmp_path / "all.toml"
    file.write_text(re.sub(r"^# ([a-z_]+ = )", r"\1", options.reference_toml(), flags=re.MULTILINE))
    loaded = options.load(str(file), env={})
    assert loaded.config == Config()
    assert set(loaded.origins.values()) == {str(file)}


def test_every_option_has_a_flag_and_a_meaning() -> None:
    parser = argparse.ArgumentParser()
    options.add_flags(parser)
    given = vars(parser.parse_args(["--device", "sim:0", "--cache-block-size", "8"]))
    assert given == {"device.device": "sim:0", "cache.block_size": "8"}
    assert all(option.doc for option in options.options())


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1", 1), ("2KiB", 2048), ("2kb", 2000), ("1.5GiB", 3 * 2**29), ("4 G", 4 * 10**9)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1PiB", "1 1"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(text)


# --- tenants --------------------------------------------------------------------------------------

ALICE = """
[[tenants]]
name = "alice"
endpoint = "ipc://a"
share_percent = 30
"""
BOB = """
[[tenants]]
name = "bob"
endpoint = "ipc://b"
share_percent = 12.5
"""


def file_of(directory: Path, text: str) -> str:
    path = directory / "c.toml"
    path.write_text(text)
    return str(path)


def test_tenants_come_from_the_file(tmp_path: Path) -> None:
    loaded = options.load(file_of(tmp_path, ALICE + BOB), env={})
    alice, bob = loaded.config.tenants
    assert alice == TenantConfig("alice", "ipc://a", 30.0)
    assert bob == TenantConfig("bob", "ipc://b", 12.5)
    assert loaded.origins["tenants[1].share_percent"] == str(tmp_path / "c.toml")


def test_nobody_chooses_a_salt(tmp_path: Path) -> None:
    text = faults(path=file_of(tmp_path, ALICE + 'salt = "very secret"'))
    assert "unknown key tenants[0].salt" in text
    assert "very secret" not in text


def test_a_tenant_without_an_endpoint_needs_a_list_of_keys(tmp_path: Path) -> None:
    keyed = ALICE.replace("ipc://a", "")
    text = faults(path=file_of(tmp_path, keyed))
    assert "tenants: 'alice' has no endpoint, and without ipc.keys_file no key either" in text
    curve = '[ipc]\nserver_key_file = "s"\nkeys_file = "k"\n'
    loaded = options.load(file_of(tmp_path, curve + keyed + BOB), env={})
    assert endpoints_of(loaded.config)[2:] == ["ipc://b"]


TCP = {"ipc.endpoint": "tcp://127.0.0.1:5555", "ipc.admin_endpoint": "ipc://admin"}
CURVE = {"ipc.server_key_file": "s", "ipc.keys_file": "k"}


def test_tcp_without_curve_is_refused_unless_it_is_said_aloud() -> None:
    sentence = "tcp://127.0.0.1:5555: TCP needs CURVE"
    assert sentence in faults(flags=TCP)
    for more in (CURVE, {"ipc.insecure_tcp": "true"}):
        assert options.load(env={}, flags=TCP | more).config.ipc.endpoint == TCP["ipc.endpoint"]


def test_a_port_besides_the_unix_socket() -> None:
    port = {"ipc.tcp_endpoint": "tcp://127.0.0.1:5555"}
    assert "tcp://127.0.0.1:5555: TCP needs CURVE" in faults(flags=port)
    config = options.load(env={}, flags=port | CURVE).config
    assert endpoints_of(config) == [
        config.ipc.endpoint,
        f"{config.ipc.endpoint}.admin",
        "tcp://127.0.0.1:5555",
    ]
    text = faults(flags=CURVE | {"ipc.tcp_endpoint": "ipc://x"})
    assert "ipc.tcp_endpoint: expected tcp://HOST:PORT" in text
    twice = CURVE | TCP | {"ipc.tcp_endpoint": TCP["ipc.endpoint"]}
    assert "is given to more than one tenant or role" in faults(flags=twice)


def test_half_of_curve_and_twice_an_answer_are_refused() -> None:
    for name in CURVE:
        assert "CURVE needs both of them, or neither" in faults(flags={name: "x"})
    assert "TCP is protected" in faults(flags=CURVE | {"ipc.insecure_tcp": "true"})


def test_faults_of_tenants_are_reported_together(tmp_path: Path) -> None:
    nobody = "[[tenants]]\nshare_percent = 0\nendpont = 'ipc://c'\n"
    text = faults(path=file_of(tmp_path, ALICE + nobody), env={"RTCACHE_TENANTS_NAME": "x"})
    assert "unknown key tenants[1].endpont; did you mean tenants[1].endpoint?" in text
    assert "tenants[1].share_percent = 0: Expected `float` > 0" in text
    assert "tenants[1].name is missing" in text
    assert "tenants[1].endpoint is missing" in text
    assert "environment RTCACHE_TENANTS_NAME: tenants are given in the file only" in text
    assert text.count("\n  - ") == 5


@pytest.mark.parametrize("text", ["tenants = 3", "tenants = ['a']", "[tenants]\nname = 'a'"])
def test_tenants_are_an_array_of_tables(tmp_path: Path, text: str) -> None:
    assert "tenants must be tables, each under [[tenants]]" in faults(path=file_of(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "is_legal"),
    [("a", True), ("a" * 64, True), ("A-z_0.9", True), ("", False), ("a" * 65, False)]
    + [(name, False) for name in ("a b", "ä", "a/b", "a\n")],
)
def test_names_of_tenants(tmp_path: Path, name: str, is_legal: bool) -> None:
    path = file_of(tmp_path, ALICE.replace('"alice"', json.dumps(name)))
    if is_legal:
        assert options.load(path, env={}).config.tenants[0].name == name
    else:
        assert "tenants[0].name = " in faults(path=path)


@pytest.mark.parametrize(
    ("was", "now", "sentence"),
    [
        ('"bob"', '"alice"', "tenants: 2 of them have the name 'alice'"),
        ("ipc://b", "ipc://a", "tenants: the endpoint 'ipc://a' is given to more than one"),
        ("ipc://b", "ipc://main", "tenants: the endpoint 'ipc://main' is given to more than one"),
        ("ipc://b", "ipc://main.admin", "tenants: the endpoint 'ipc://main.admin' is given to"),
        ("12.5", "70", "tenants: their shares are 100 percent together"),
    ],
)
def test_tenants_are_told_apart_and_leave_a_share(
    tmp_path: Path, was: str, now: str, sentence: str
) -> None:
    path = file_of(tmp_path, ALICE + BOB.replace(was, now))
    text = faults(path=path, flags={"ipc.endpoint": "ipc://main"})
    assert sentence in text
    assert text.count("\n  - ") == 1


def test_the_default_tenant_may_keep_little(tmp_path: Path) -> None:
    loaded = options.load(file_of(tmp_path, ALICE + BOB.replace("12.5", "69.9")), env={})
    assert len(loaded.config.tenants) == 2


def test_the_example_of_the_reference_file_is_a_tenant(tmp_path: Path) -> None:
    text = re.sub(r"^#(?=[a-z_]+ = |\[\[)", "", options.reference_toml(), flags=re.MULTILINE)
    loaded = options.load(file_of(tmp_path, text), env={})
    endpoint = "ipc:///run/rtcached/search.sock"
    assert loaded.config.tenants == (TenantConfig("search", endpoint, 25.0),)
