"""docs/security.md against the code: its examples are taken, and its lists are whole."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import msgspec
import pytest

from ipc.curve_keys import is_key
from runtime_cache import options
from runtime_cache.config import IpcConfig
from runtime_cache.keys import KeyList
from runtime_cache.reload import RELOADABLE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "security.md").read_text("utf-8")
#: Modules and functions that make programs of what they read.
CARRIES_OUT = {"pickle", "cPickle", "dill", "marshal", "shelve", "eval", "exec", "allow_pickle"}
KEYS, CONFIG = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
EXAMPLE = msgspec.convert(tomllib.loads(KEYS), KeyList)


def test_the_example_of_a_list_is_one() -> None:
    (key,) = EXAMPLE.keys
    assert is_key(key.public_key)
    assert (key.role, key.tenant, key.quota.max_requests) == ("user", "search", 32)


def test_the_example_of_a_configuration_is_one(tmp_path: Path) -> None:
    path = tmp_path / "rtcached.toml"
    path.write_text(CONFIG)
    config = options.load(str(path), env={}).config
    ipc = config.ipc
    assert ipc.tcp_endpoint.startswith("tcp://")
    assert ipc.server_key_file.endswith(".key_secret")
    assert {key.tenant for key in EXAMPLE.keys} <= {tenant.name for tenant in config.tenants}


@pytest.mark.parametrize("path", sorted(RELOADABLE))
def test_what_can_be_changed_in_service_is_listed_and_exists(path: str) -> None:
    assert f"`{path}`" in TEXT
    assert path in {option.path for option in options.options()}


def test_every_option_of_the_page_exists() -> None:
    known = {option.path for option in options.options()}
    named = set(re.findall(r"`((?:ipc|daemon|engine|log|metrics)\.[a-z_]+)`", TEXT))
    assert named <= known
    about_security = ("server_key_file", "keys_file", "insecure_tcp", "socket_mode")
    assert {f"ipc.{name}" for name in about_security} <= named
    assert set(about_security) <= set(IpcConfig.__struct_fields__)


def names_in(path: Path) -> set[str]:
    """Whatever a file imports, calls or names as an argument."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
        elif isinstance(node, ast.Call):
            names |= {node.func.id} if isinstance(node.func, ast.Name) else set()
            names |= {word.arg for word in node.keywords if word.arg is not None}
    return names


def test_nothing_that_comes_is_unpickled_or_evaluated() -> None:
    assert "nothing is ever unpickled or evaluated" in TEXT
    tops = [ROOT / top for top in ("ipc", "runtime_cache", "om_models")]
    paths = [path for top in tops for path in top.rglob("*.py")]
    paths = [path for path in paths if "node_modules" not in path.parts]
    found = {str(path.relative_to(ROOT)) for path in paths if CARRIES_OUT & names_in(path)}
    # Runs the user's own program on the software device, as Python itself would.
    assert found == {"runtime_cache/aclsim/run.py"}
