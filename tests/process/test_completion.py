"""What shells complete, asked of the shells themselves."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from tests.support.rtcached import PATIENCE_S, run
from tools.admin.commands import COMMANDS
from tools.admin.completion import PROGRAMS, SHELLS, script

#: What a word is completed to, by bash itself: the function that the script registers is called.
_ASK_BASH = """
COMP_WORDS=({words})
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
COMP_LINE="${{COMP_WORDS[*]}}"
COMP_POINT=${{#COMP_LINE}}
function=$(complete -p "${{COMP_WORDS[0]}}" | sed 's/.*-F \\([^ ]*\\).*/\\1/')
"$function" "${{COMP_WORDS[0]}}" "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD-1]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completed(*words: str) -> set[str]:
    """What bash offers for the last word."""
    quoted = " ".join(f"'{word}'" for word in words)
    ended = subprocess.run(
        ["bash", "--norc", "-c", f"{script(words[0], 'bash')}\n{_ASK_BASH.format(words=quoted)}"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert ended.stderr == ""
    return set(ended.stdout.split())


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("rtcache-admin", "li"), {"list"}),
        (("rtcache-admin", "un"), {"unpin"}),
        (("rtcache-admin", "list", "--so"), {"--sort"}),
        (("rtcache-admin", "list", "--sort", "t"), {"tokens"}),
        (("rtcache-admin", "evict", "--dr"), {"--dry-run"}),
        (("rtcache-admin", "completion", "z"), {"zsh"}),
        (("rtcache", "gen"), {"generate"}),
        (("rtcache", "generate", "--max"), {"--max-tokens"}),
        (("rtcached", "--cache-block"), {"--cache-block-size"}),
        (("rtcache-convert", "--kv-c"), {"--kv-capacity"}),
        (("rtcache-bench", "ste"), {"step"}),
        (("rtcache-doctor", "--no-p"), {"--no-probe"}),
    ],
)
def test_bash_completes(words: tuple[str, ...], offered: set[str]) -> None:
    assert completed(*words) == offered


def test_every_command_is_offered() -> None:
    assert completed("rtcache-admin", "") >= {command.name for command in COMMANDS}


def test_bash_offers_files_where_a_file_is_meant(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path_factory.mktemp("files")
    (here / "prompts.jsonl").write_text("")
    monkeypatch.chdir(here)
    assert completed("rtcache-admin", "register", "--jsonl", "pro") == {"prompts.jsonl"}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_can_read_theirs(shell: str) -> None:
    texts = {program: script(program, shell) for program in PROGRAMS}
    assert all(program in text for program, text in texts.items())
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: its scripts are made, not read")
    for text in texts.values():
        subprocess.run([shell, "-n"], input=text, text=True, timeout=PATIENCE_S, check=True)


def test_the_command_prints_all_for_bash_and_one_for_others() -> None:
    ended = run("tools.admin.main", "completion", "bash")
    assert (ended.code, ended.complaint) == (0, "")
    functions = {f"_shtab_{name.replace('-', '_')}" for name in PROGRAMS}
    assert all(f"-F {name}" in ended.out for name in functions)
    as_json = json.loads(run("tools.admin.main", "completion", "fish", "rtcache", "--json").out)
    assert list(as_json) == ["rtcache"]
    assert set(SHELLS) == {"bash", "zsh", "fish"}
