"""The blocking client and `rtcache`, against a daemon on a thread of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ipc import cli
from ipc.answers import Piece
from ipc.errors import Closed, EndpointError, ServerError, Timeout
from ipc.link import DEFAULT_WINDOW
from ipc.messages import (
    CacheReport,
    Cancel,
    Chat,
    ChatMessage,
    Generate,
    MessageId,
    PrefixName,
)
from ipc.sync_client import Client
from tests.support.ipc_daemon import DaemonThread

DIGEST = "5e884898da280471"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonThread]:
    with DaemonThread(f"ipc://{tmp_path}/s", role="admin") as thread:
        yield thread


@pytest.fixture(params=["msgpack", "json"])
def client(request: pytest.FixtureRequest, daemon: DaemonThread) -> Iterator[Client]:
    with Client(daemon.endpoint, encoding=request.param) as client:
        yield client


def test_an_answer_piece_by_piece_and_as_a_whole(client: Client) -> None:
    stream = client.generate("count 3", temperature=0)
    assert list(stream) == [Piece(f"{n} ", (n,)) for n in range(3)]
    result = stream.result()
    assert (result.text, result.token_ids, result.finish_reason) == ("0 1 2 ", (0, 1, 2), "length")
    assert client.generate("count 3", stream=False).result() == result
    assert client.chat([{"role": "user", "content": "echo"}]).result().text == "echo"


def test_the_small_calls(client: Client) -> None:
    assert client.ping().version == "0.1.0"
    assert client.info().vocab_size == 10
    assert client.tokenize("x") == (1, 2)
    assert client.register("x").num_tokens == 3
    assert client.list(limit=7).total == 7
    assert client.list(limit=7, offset=2, tenant="a").total == 9
    assert client.evict(max_blocks=5).num_blocks == 5
    assert client.evict(all=True).num_blocks == 99
    assert client.evict(digest=DIGEST).num_blocks == 99
    assert client.evict(idle_s=0, tenant="a").num_blocks == 99
    assert client.pin(DIGEST).expires_in_s is None
    assert client.pin(DIGEST, 60, tenant="a").expires_in_s == 60
    assert client.unpin(DIGEST).digest == DIGEST
    for explained in (
        client.explain("x"),
        client.explain(prompt_ids=range(3), prefix_id="p-1"),
        client.explain(messages=[{"role": "user", "content": "x"}], tenant="a"),
    ):
        assert (explained.prompt_tokens, explained.cache) == (9, CacheReport("cold"))
    assert client.stats() == {"pool": {"num_blocks": 3}}
    client.cancel("77")
    with pytest.raises(ServerError, match="its log has the details"):
        client.release("p-1")


def test_an_answer_says_what_the_cache_did_streamed_or_not(client: Client) -> None:
    report = CacheReport("diverged", 500, 812)
    for stream in (True, False):
        result = client.generate("count 3", stream=stream, use_cache=True).result()
        assert (result.usage.cached_tokens, result.cache) == (500, report)


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.pin("5e88"),
        lambda client: client.pin("5E884898"),
        lambda client: client.unpin(""),
        lambda client: client.evict(digest="x" * 8),
        lambda client: client.generate("x", cache_priority=101).result(),
    ],
)
def test_what_the_daemon_refuses_costs_one_call(client: Client, ask: Any) -> None:
    with pytest.raises(ServerError) as caught:
        ask(client)
    assert caught.value.code == "invalid_request"
    assert client.ping().version == "0.1.0"


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.evict(),
        lambda client: client.evict(all=True, idle_s=1),
        lambda client: client.explain(),
        lambda client: client.explain("x", prompt_ids=[1]),
        lambda client: client.explain(messages=[{"role": "x", "content": ""}]),
        lambda client: client.pin("5e884898", float("nan")),
    ],
)
def test_what_is_wrong_in_itself_is_not_sent(
    client: Client, daemon: DaemonThread, ask: Any
) -> None:
    with pytest.raises(ValueError, match=r"must be|messages"):
        ask(client)
    client.ping()
    assert len(daemon.daemon.requests) == 1


def test_a_prompt_that_is_too_large_fails_its_own_call_only(client: Client) -> None:
    other = client.generate("hold")
    with pytest.raises(ServerError, match="bytes, the limit is 4194304") as caught:
        client.generate("x" * 5_000_000).result()
    assert caught.value.code == "too_large"
    other.cancel()
    assert client.ping().version == "0.1.0"


def test_two_answers_may_be_read_in_turn(client: Client) -> None:
    first, second = iter(client.generate("count 3")), iter(client.generate("count 2"))
    texts = [next(first).text, next(second).text, next(first).text, next(second).text]
    assert texts == ["0 ", "0 ", "1 ", "1 "]
    assert [piece.text for piece in first] == ["2 "]
    assert list(second) == []


def test_leaving_the_loop_cancels(client: Client, daemon: DaemonThread) -> None:
    for _ in client.generate("begin"):
        break
    stream = client.generate("hold")
    stream.cancel()
    stream.cancel()
    with pytest.raises(Closed):
        stream.result()
    client.ping()
    daemon.wait_for(lambda seen: len(seen.requests) == 5)
    requests = daemon.daemon.requests
    assert requests[1] == Cancel(MessageId("2"), target=MessageId("1"))
    assert requests[3] == Cancel(MessageId("4"), target=MessageId("3"))


def test_everything_can_be_cancelled_at_once(client: Client, daemon: DaemonThread) -> None:
    streams = [client.generate("hold") for _ in range(2)]
    client.cancel_all()
    client.cancel_all()
    client.ping()
    cancels = [request for request in daemon.daemon.requests if isinstance(request, Cancel)]
    assert [request.target for request in cancels] == [stream.id for stream in streams]


def test_no_daemon_means_a_timeout_and_not_a_hang(tmp_path: Path) -> None:
    with Client(f"ipc://{tmp_path}/s", timeout_s=0.01) as client:
        with pytest.raises(Timeout, match="is rtcached running"):
            client.ping()
        with pytest.raises(Timeout, match=r"within 0\.02 s"):
            client.generate("x", timeout_s=0.02).result()


def test_a_closed_client_says_so(daemon: DaemonThread) -> None:
    client = Client(daemon.endpoint)
    stream = client.generate("hold")
    client.close()
    client.close()
    with pytest.raises(Closed, match="the client was closed"):
        stream.result()
    with pytest.raises(Closed, match="the client is closed"):
        client.ping()


def test_an_endpoint_that_is_none() -> None:
    with pytest.raises(EndpointError, match="cannot connect to 'nonsense'"):
        Client("nonsense")


# --- rtcache ------------------------------------------------------------------------------------


@pytest.fixture
def endpoint(daemon: DaemonThread, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("RTCACHE_ENDPOINT", daemon.endpoint)
    return daemon.endpoint


Output = pytest.CaptureFixture[str]


@pytest.mark.usefixtures("endpoint")
def test_generate_prints_the_answer(capsys: Output) -> None:
    assert cli.main(["generate", "count 3", "--usage"]) == 0
    out, err = capsys.readouterr()
    assert out == "0 1 2 \n"
    assert err == (
        "[length; prompt 550 tokens, cached 500, prefilled 50; answer 3; first token 25 ms, "
        "20.0 tokens/s]\n"
        "[cached 500 of 550 tokens: diverged at token 500; the nearest cached prefix has 812 "
        "tokens]\n"
    )


def test_every_sampling_option_reaches_the_daemon(endpoint: str, daemon: DaemonThread) -> None:
    line = (
        "generate count --prefix-id p-1 --max-tokens 5 --temperature 0 --top-k 3 --top-p 0.5 "
        "--min-p 0.1 --seed 7 --repetition-penalty 1.5 --presence-penalty 0.5 "
        "--frequency-penalty -0.5 --stop a --stop b --ignore-eos --logprobs 2 --deadline-ms 9 "
        "--no-cache --cache-priority 7"
    )
    assert cli.main(["--endpoint", endpoint, *line.split()]) == 0
    assert daemon.daemon.requests[1] == Generate(
        MessageId("2"),
        credit=DEFAULT_WINDOW,
        prompt="count",
        prefix_id=PrefixName("p-1"),
        max_tokens=5,
        temperature=0,
        top_k=3,
        top_p=0.5,
        min_p=0.1,
        seed=7,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        stop=("a", "b"),
        ignore_eos=True,
        logprobs=2,
        deadline_ms=9,
        use_cache=False,
        cache_priority=7,
    )


def test_options_left_out_are_the_daemons_choice(endpoint: str, daemon: DaemonThread) -> None:
    assert cli.main(["generate", "count", "--endpoint", endpoint]) == 0
    assert daemon.daemon.requests[1] == Generate(
        MessageId("2"), prompt="count", credit=DEFAULT_WINDOW
    )


@pytest.mark.usefixtures("endpoint")
def test_json_is_one_object(capsys: Output) -> None:
    assert cli.main(["--json", "generate", "count 2"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["text"], answer["token_ids"]) == ("0 1 ", [0, 1])
    assert answer["usage"]["cached_tokens"] == 500
    assert answer["cache"] == {"reason": "diverged", "diverged_at": 500, "nearest_tokens": 812}
    assert cli.main(["ping", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "version": "0.1.0",
        "uptime_s": 12.5,
        "state": "serving",
        "incarnation": "",
    }
    assert cli.main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["limits"] == {"max_message_bytes": 4194304}


@pytest.mark.usefixtures("endpoint")
def test_ping_and_info_for_people(capsys: Output) -> None:
    assert cli.main(["ping"]) == 0
    assert capsys.readouterr().out == "rtcached 0.1.0, up for 12 s, serving\n"
    assert cli.main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "model                    counting"
    assert "limits.max_message_bytes 4194304" in lines


@pytest.mark.usefixtures("endpoint")
def test_the_prompt_may_come_from_a_file_or_stdin(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt"
    file.write_text("count 2", encoding="utf-8")
    assert cli.main(["generate", "--prompt-file", str(file)]) == 0
    with file.open(encoding="utf-8") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert cli.main(["generate", "--prompt-file", "-"]) == 0
    assert capsys.readouterr().out == "0 1 \n0 1 \n"


def test_chat_asks_one_question(endpoint: str, daemon: DaemonThread, capsys: Output) -> None:
    assert cli.main(["chat", "--system", "be brief", "--message", "hello"]) == 0
    assert capsys.readouterr().out == "hello\n"
    assert daemon.daemon.requests[1] == Chat(
        MessageId("2"),
        credit=DEFAULT_WINDOW,
        messages=(ChatMessage("system", "be brief"), ChatMessage("user", "hello")),
    )


def test_chat_remembers_answers_and_forgets_what_was_refused(
    endpoint: str,
    daemon: DaemonThread,
    tmp_path: Path,
    capsys: Output,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = tmp_path / "lines"
    lines.write_text("count 2\n\nrefuse\necho", encoding="utf-8")
    with lines.open(encoding="utf-8") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert cli.main(["chat"]) == 0
    out, err = capsys.readouterr()
    assert out == "0 1 \necho\n"
    assert err == (
        "rtcache: 256 requests are waiting already (queue_full)\n"
        "rtcache: the same request can succeed later; try again after 5 ms\n"
    )
    last = daemon.daemon.requests[-1]
    assert isinstance(last, Chat)
    assert last.messages == (
        ChatMessage("user", "count 2"),
        ChatMessage("assistant", "0 1 "),
        ChatMessage("user", "echo"),
    )


@pytest.mark.usefixtures("endpoint")
@pytest.mark.parametrize(
    ("line", "code", "complaint"),
    [
        (["generate", "refuse"], 75, "256 requests are waiting already (queue_full)"),
        (["generate", "x", "--temperature", "-1"], 1, "`temperature`: expected a number ≥ 0, got"),
        (["generate"], 2, "give either a prompt or --prompt-file"),
        (["generate", "x", "--prompt-file", "y"], 2, "give either a prompt or --prompt-file"),
        (["generate", "--prompt-file", "/no/such/file"], 2, "No such file or directory"),
        (["ping", "--endpoint", "nonsense"], 2, "cannot connect to 'nonsense'"),
    ],
)
def test_exit_codes(line: list[str], code: int, complaint: str, capsys: Output) -> None:
    assert cli.main(line) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("rtcache: ")
    assert complaint in err


@pytest.mark.parametrize("command", [["ping"], ["generate", "x"], ["chat", "--message", "x"]])
def test_exit_code_without_a_daemon(command: list[str], tmp_path: Path, capsys: Output) -> None:
    line = ["--endpoint", f"ipc://{tmp_path}/s", "--timeout", "0.01", *command]
    assert cli.main(line) == 3
    assert "is rtcached running" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", [[], ["fly"], ["ping", "--timeout", "0"], ["ping", "--timeout", "soon"], ["ping", "x"]]
)
def test_usage_errors(line: list[str], capsys: Output) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(line)
    assert caught.value.code == 2
    assert "usage: rtcache" in capsys.readouterr().err


@pytest.mark.parametrize("line", [["--help"], ["generate", "--help"]])
def test_help(line: list[str], capsys: Output) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(line)
    assert caught.value.code == 0
    assert "--endpoint" in capsys.readouterr().out
