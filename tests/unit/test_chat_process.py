"""A chat template in its own process: the same texts, and limits that hold against anything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from om_models.chat import ChatTemplate, ChatTemplateError
from om_models.chat_process import ChatProcess
from tests.support.process_state import is_running

DATA = json.loads((Path(__file__).parents[1] / "data/tokenizers/chat.json").read_text("utf-8"))
USER = {"role": "user", "content": "Hi"}
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
#: In a test with limits of its own a conversation gets this long [seconds].
SHORT_S = 0.3


@pytest.fixture(scope="module")
def plain() -> Iterator[ChatProcess]:
    with closing(ChatProcess(PLAIN)) as template:
        yield template


def children() -> set[int]:
    """Our children that run."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return {int(pid) for pid in listed.split()}


@pytest.mark.parametrize("name", sorted(DATA["templates"]))
def test_texts_are_those_of_the_template_itself(name: str) -> None:
    source = DATA["templates"][name]
    here = ChatTemplate(source, "<s>", "</s>")
    with closing(ChatProcess(source, "<s>", "</s>")) as there:
        for case in DATA["cases"]:
            messages = case["messages"]
            assert result(there, messages) == result(here, messages)


def result(template: Any, messages: Any) -> str:
    try:
        return str(template.render(messages))
    except ChatTemplateError as error:
        return f"refused: {error}"


@pytest.mark.parametrize("text", ["", "é 漢 😀", "\0\x1b\r\n", "\ud800", '"\\', "x" * 3_000_000])
def test_any_text_goes_there_and_back(plain: ChatProcess, text: str) -> None:
    assert plain.render([{"role": "user", "content": text}]) == f"user:{text};"


#: Each is more than any time or memory, in another way.
HOSTILE = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "doubling a text": "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "a list that holds itself twice over": "{% set ns = namespace(x=['a']) %}"
    "{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "comparing such lists": "{% set ns = namespace(x=['a'], y=['a']) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "a wide text": "{{ messages[0].content|center(10000000000) }}",
    "a wide number": "{{ '%010000000000d' % 1 }}",
    "replacing": "{% set x = 'a'|center(4000000) %}{{ x|replace(' ', x) }}",
    "a long sort": "{% set x = range(99999)|list * 160 %}{{ x|sort|sort|sort|length }}",
    "endless macros": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
}


#: The others are run by `make test-long`.
QUICK = ("loops in loops", "a list that holds itself twice over", "a wide text")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in HOSTILE],
)
def test_a_hostile_template_costs_its_limits_and_no_more(name: str) -> None:
    template = ChatProcess(HOSTILE[name], limit_s=SHORT_S, memory_bytes=256 * 1024**2)
    with (
        closing(template),
        pytest.raises(ChatTemplateError, match=r"took|failed|recursion"),
    ):
        template.render([USER])


@pytest.mark.parametrize("constant", ["'a'|center(10000000000)", "'%999999999d' % 1"])
def test_a_template_that_is_worked_out_when_it_is_compiled(constant: str) -> None:
    template = ChatProcess(f"{{{{ {constant} }}}}", memory_bytes=256 * 1024**2)
    with closing(template), pytest.raises(ChatTemplateError, match="too much memory"):
        template.render([USER])


def test_after_a_hostile_conversation_the_next_is_as_good_as_any() -> None:
    source = "{% if messages[0].content == 'hang' %}" + HOSTILE["loops in loops"] + "{% endif %}ok"
    # In this time the good ones are to be read, on a busy machine too.
    with closing(ChatProcess(source, limit_s=1.0)) as template:
        assert template.render([USER]) == "ok"
        with pytest.raises(ChatTemplateError, match=r"longer than 1 s, and was stopped"):
            template.render([{"role": "user", "content": "hang"}])
        assert template.render([USER]) == "ok"


def test_a_child_that_was_killed_is_replaced() -> None:
    with closing(ChatProcess(PLAIN)) as template:
        before = children()
        assert template.render([USER]) == "user:Hi;"
        (pid,) = children() - before
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ChatTemplateError, match=r"ended its process \(code -9\)"):
            template.render([USER])
        assert template.render([USER]) == "user:Hi;"


def test_nothing_is_left_of_a_closed_one() -> None:
    before = children()
    template = ChatProcess(PLAIN)
    assert children() == before  # it is not started before it is wanted
    template.start()
    assert len(children() - before) == 1
    template.close()
    template.close()
    assert children() == before
    with pytest.raises(ChatTemplateError, match="is closed"):
        template.render([USER])


def test_closing_does_not_wait_for_a_conversation_that_hangs() -> None:
    template = ChatProcess(HOSTILE["loops in loops"], limit_s=1000.0)
    template.start()
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(template.render, [USER])
        while not hanging.running():
            pass
        template.close()
        with pytest.raises(ChatTemplateError, match=r"ended its process|is closed"):
            hanging.result()


def test_the_child_ends_with_its_parent() -> None:
    program = (
        "import os, sys, time\n"
        "from om_models.chat_process import ChatProcess\n"
        "template = ChatProcess('x'); template.start()\n"
        "print(template._child._process.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    give_up_s = time.monotonic() + 20
    while is_running(pid):
        assert time.monotonic() < give_up_s


def test_the_child_has_nothing_of_ours(plain: ChatProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTCACHE_SECRET", "very secret")
    with closing(ChatProcess(PLAIN)) as template:
        before = children()
        with open("/dev/null", "rb") as ours:
            os.set_inheritable(ours.fileno(), True)
            template.start()
        (pid,) = children() - before
        assert b"very secret" not in Path(f"/proc/{pid}/environ").read_bytes()
        assert {int(fd) for fd in os.listdir(f"/proc/{pid}/fd")} == {0, 1, 2}


def test_what_is_no_template_is_refused_without_a_process() -> None:
    before = children()
    with pytest.raises(ChatTemplateError, match="the chat template is not valid"):
        ChatProcess("{% if %}")
    with pytest.raises(ChatTemplateError, match="the chat template is not valid"):
        ChatProcess("{{ " + "(" * 100_000)
    assert children() == before


@pytest.mark.parametrize("messages", [[], [{"role": "x", "content": ""}], [{"role": "user"}]])
def test_wrong_messages_are_refused_before_anything_is_asked(messages: Any) -> None:
    with closing(ChatProcess(PLAIN)) as template:
        before = children()
        with pytest.raises(ChatTemplateError):
            template.render(messages)
        assert children() == before
