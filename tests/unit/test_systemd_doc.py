"""docs/systemd.md names what there is: files, options, nodes, and what the daemon says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runtime_cache import options, watchdog

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "systemd.md").read_text("utf-8")
RUN = (ROOT / "tools" / "container" / "run.sh").read_text("utf-8")


def shell_list(name: str) -> list[str]:
    """The words of an array in run.sh."""
    (body,) = re.findall(rf"^readonly {name}=\(([^)]*)\)", RUN, re.M)
    return str(body).split()


def test_files_of_this_repository_are_there() -> None:
    for name in re.findall(r"\btools/[\w./-]+", TEXT):
        assert (ROOT / name.rstrip(".")).exists(), name
    for name in ("rtcached.service", "rtcached@.service", "host-mounts.conf", "board-nodes.conf"):
        assert name in TEXT
        assert (ROOT / "tools" / "systemd" / name).exists()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)]+)\)", TEXT))))
def test_links_lead_somewhere(target: str) -> None:
    name, _, anchor = target.partition("#")
    text = (ROOT / "docs" / name).read_text("utf-8") if name else TEXT
    anchors = {
        re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", text, re.M)
    }
    assert not anchor or anchor in anchors


def test_options_are_options() -> None:
    known = {option.env for option in options.options()} | {"RTCACHE_SECTION_KEY"}
    clients = {"RTCACHE_ENDPOINT"}
    assert set(re.findall(r"\bRTCACHE_[A-Z_]+", TEXT)) <= known | clients
    paths = {option.path for option in options.options()}
    named = set(re.findall(r"`((?:ipc|device|model|metrics)\.\w+)`", TEXT))
    assert named
    assert named <= paths


def test_nodes_and_files_of_a_container_are_those_of_run_sh() -> None:
    written = re.findall(r"--device /dev/(\w+)", TEXT)
    assert written == ["davinci0", *shell_list("NODES"), *shell_list("BOARD_NODES")]
    mounted = re.findall(r"-v (/[^:\s]+):", TEXT)
    assert mounted == [*shell_list("FILES"), *shell_list("BOARD_FILES")]


def test_what_the_daemon_says_is_quoted_right() -> None:
    assert watchdog._STUCK in TEXT.replace("\n", " ")
    for event in re.findall(r"`(watchdog_\w+)`", TEXT):
        assert f'"{event}"' in (ROOT / "runtime_cache" / "watchdog.py").read_text("utf-8")
