"""A running daemon and clients that mean no good: each gets its answer, nobody else notices.

One daemon serves all of these tests; after each, nothing is live and the gauges add up.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from ipc.errors import ServerError
from ipc.sync_client import Client
from tests.support.rtcached import PATIENCE_S, RawClient, wait_until, wait_until_idle
from tools.daemon_process import DaemonProcess

VOCAB = 257
MAX_PROMPT = 4095
GREEDY = {"type": "generate", "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def daemon(null_bundle: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(null_bundle, "sim:0") as running:
        yield running
        odd = [e for e in running.events if e.get("level") not in {"info", "warning"}]
        assert odd == []  # neither errors nor what libraries print
        with Client(running.admin_endpoint) as client:
            sockets = client.stats()["ipc"].values()
        num_refused = sum(sum(counters["refused"].values()) for counters in sockets)
    # A line each, or counted among those that were left out, the last of them at the end.
    lines = [e for e in running.events if e["event"] == "message_refused"]
    left_out = [e["count"] for e in running.events if e.get("of") == "message_refused"]
    assert len(lines) + sum(left_out) == num_refused
    assert left_out


@pytest.fixture(scope="module")
def admin(daemon: DaemonProcess) -> Iterator[Client]:
    with Client(daemon.admin_endpoint) as client:
        yield client


@pytest.fixture(autouse=True)
def all_is_well(admin: Client) -> Iterator[None]:
    yield
    settle(admin)
    stats = admin.stats()
    pool, engine = stats["pool"], stats["engine"]
    assert pool["live_blocks"] == 0
    assert pool["cached_blocks"] + pool["free_blocks"] == pool["num_blocks"] == 127
    ends = ("refused", "finished", "cancelled", "expired", "failed", "registered")
    assert engine["arrived"] == sum(engine[name] for name in ends)
    assert (engine["failed_steps"], engine["late"]) == (0, 0)
    assert [stats["ipc"][role]["handler_errors"] for role in ("user", "admin")] == [0, 0]


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[RawClient]:
    with RawClient(daemon.endpoint) as raw:
        yield raw


@pytest.fixture
def operator(daemon: DaemonProcess) -> Iterator[RawClient]:
    with RawClient(daemon.admin_endpoint) as raw:
        yield raw


def settle(admin: Client) -> None:
    """Wait until no request is in work, and give up what is kept."""
    for entry in admin.list(limit=1000).entries:
        if entry.prefix_id is not None:
            admin.release(entry.prefix_id)
        elif entry.kept:
            admin.unpin(entry.digest)
    wait_until_idle(admin)


def resident_mib(daemon: DaemonProcess) -> int:
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) // 1024


# --- messages that are none -----------------------------------------------------------------------

PING = b'{"type":"ping","id":"1"}'
NESTED = b'{"type":"ping","id":"n","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    ("frames", "code", "message_id"),
    [
        ([b""], "bad_encoding", None),
        ([b"\x01"], "bad_encoding", None),
        ([b"{"], "bad_encoding", None),
        ([b"[]"], "bad_encoding", None),
        ([b'{"type":"ping","id":"\xff\xfe"}'], "bad_encoding", None),
        ([b'{"type":"generate","id":"a","prompt":"\xff"}'], "bad_encoding", "a"),
        ([b'{"type":"generate","id":"a","prompt":"\\ud800"}'], "bad_encoding", "a"),
        ([b'{"type":"generate","id":"a","prompt":"x","temperature":NaN}'], "bad_encoding", "a"),
        (
            [b'{"type":"generate","id":"a","prompt":"x","temperature":1e999}'],
            "invalid_request",
            "a",
        ),
        ([b"\x82\xa4type\xa4ping\xa2id" + b"\x91" * 100_000], "bad_encoding", None),
        ([NESTED], "bad_encoding", "n"),
        ([b'{"type":"ping","id":"1"}', b""], "bad_frames", None),
        ([b"", b"", b'{"type":"ping","id":"1"}'], "bad_frames", None),
        ([b"{}"] * 1000, "bad_frames", None),
        ([b'{"type":"ping","id":"a b"}'], "invalid_request", None),
        ([b'{"type":"stats","id":"s"}'], "forbidden", "s"),
        ([b'{"type":"reboot","id":"s"}'], "unknown_type", "s"),
        ([b'{"type":"ping","type":"info","id":"s"}'], "unknown_type", "s"),
        ([b'{"type":"ping","id":"s","v":2}'], "unsupported_version", "s"),
    ],
)
def test_messages_that_are_none(
    client: RawClient, frames: list[bytes], code: str, message_id: str | None
):
    client.socket.send_multipart(frames)
    assert client.socket.poll(PATIENCE_S * 1000)
    payload = client.socket.recv_multipart()[-1]
    is_json = payload.startswith(b"{")
    reply = json.loads(payload) if is_json else msgspec.msgpack.decode(payload)
    assert (reply["type"], reply["code"]) == ("error", code)
    assert reply["id"] in {message_id, None}
    assert reply["message"]
    assert client.ask(type="ping", id="next")["type"] == "pong"


def test_more_refusals_than_the_log_takes(client: RawClient, operator: RawClient):
    for raw in (client, operator):
        for _ in range(100):
            raw.socket.send(b"{")
        assert {raw.receive()["code"] for _ in range(100)} == {"bad_encoding"}


@pytest.mark.parametrize(
    ("frames", "before"),
    [
        ([b"a", PING], []),
        ([b"abc", b"", PING], []),
        ([b"", PING, b""], [b""]),
        ([b"", b"", PING], [b""]),
        ([b"abcd", b"", PING, b""], [b"abcd", b""]),
    ],
)
def test_refused_frames_are_answered_behind_those_of_a_req(
    client: RawClient, frames: list[bytes], before: list[bytes]
):
    client.socket.send_multipart(frames)
    assert client.socket.poll(PATIENCE_S * 1000)
    *envelope, _ = client.socket.recv_multipart()
    assert envelope == before


GOLDEN = Path(__file__).parent.parent / "golden" / "wire"


@pytest.mark.parametrize("role", ["user", "admin"])
def test_every_request_there_is_gets_one_last_reply(daemon: DaemonProcess, role: str):
    endpoint = daemon.endpoint if role == "user" else daemon.admin_endpoint
    recorded = (json.loads(path.read_bytes()) for path in sorted(GOLDEN.glob("request.*.json")))
    requests = [request for request in recorded if request["type"] != "credit"]
    with RawClient(endpoint) as client:
        for number, request in enumerate(requests):
            client.send(**request | {"id": f"{number}"})
        finals = [client.last_reply() for _ in requests]
        assert client.ask(type="ping", id="end")["type"] == "pong"
        assert client.rest() == []
    assert {final["id"] for final in finals} == {str(number) for number in range(len(requests))}


#: What would let a client of the users' socket choose whose cache it uses, or what its key is.
CHOICES = ["tenant", "salt", "cache_salt", "extra_key", "namespace", "adapter"]


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("role", ["user", "admin"])
def test_nobody_chooses_a_tenant_or_a_salt_for_an_answer(
    daemon: DaemonProcess, role: str, name: str
):
    endpoint = daemon.endpoint if role == "user" else daemon.admin_endpoint
    turns = [{"role": "user", "content": "x"}]
    with RawClient(endpoint) as client:
        for request in (
            {"type": "generate", "prompt": "x"},
            {"type": "chat", "messages": turns},
            {"type": "register", "text": "x"},
            {"type": "tokenize", "text": "x"},
        ):
            reply = client.ask(id="a", **request, **{name: "team-a"})
            assert (reply["code"], reply["retryable"]) == ("invalid_request", False)
            assert reply["message"] == f"`{name}`: there is no such field in this message"


# --- operators ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "list"},
        {"type": "evict", "all": True},
        {"type": "pin", "digest": "0" * 64},
        {"type": "unpin", "digest": "0" * 64},
        {"type": "explain", "prompt": "x"},
        {"type": "explain", "prompt_ids": [1], "tenant": ""},
        {"type": "release", "prefix_id": "p-1", "tenant": ""},
        {"type": "stats"},
    ],
)
def test_what_users_may_not_ask(client: RawClient, fields: dict[str, Any]):
    reply = client.ask(id="a", **fields)
    assert (reply["type"], reply["id"], reply["code"]) == ("error", "a", "forbidden")


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"type": "pin", "digest": "f" * 4_000_000}, "invalid_request", "at most 64 characters"),
        ({"type": "pin", "digest": "0" * 7}, "invalid_request", "at least 8 characters"),
        ({"type": "pin", "digest": "../../et"}, "invalid_request", "hexadecimal"),
        ({"type": "pin", "digest": "0" * 64}, "unknown_entry", "0000"),
        ({"type": "pin", "digest": "0" * 64, "ttl_s": -1}, "invalid_request", "`ttl_s`"),
        ({"type": "pin", "digest": "0" * 64, "ttl_s": 1e308}, "invalid_request", "≤ 31536000"),
        ({"type": "pin", "digest": "0" * 64, "kept": True}, "invalid_request", "no such field"),
        ({"type": "unpin", "digest": "0" * 64}, "unknown_entry", "0000"),
        ({"type": "unpin", "digest": 0}, "invalid_request", "expected text, got 0"),
        ({"type": "evict"}, "invalid_request", "exactly one of"),
        ({"type": "evict", "all": True, "digest": "0" * 64}, "invalid_request", "exactly one"),
        ({"type": "evict", "digest": "0" * 64}, "unknown_entry", "0000"),
        ({"type": "evict", "idle_s": -0.5}, "invalid_request", "expected a number ≥ 0"),
        ({"type": "evict", "all": True, "tenant": "x" * 65}, "invalid_request", "at most 64"),
        ({"type": "evict", "all": True, "tenant": "x"}, "invalid_request", "no tenant 'x'"),
        ({"type": "list", "offset": 2**31}, "invalid_request", "≤ 2147483647"),
        ({"type": "list", "tenant": "\0"}, "invalid_request", "visible ASCII"),
        ({"type": "explain"}, "invalid_request", "exactly one of"),
        ({"type": "explain", "prompt": ""}, "invalid_request", "the prompt is empty"),
        ({"type": "explain", "prompt": "x" * 5_000_000}, "too_large", "the limit is 4194304"),
        ({"type": "explain", "prompt_ids": [VOCAB]}, "invalid_request", "vocabulary"),
        ({"type": "explain", "prompt": "x", "prefix_id": "p-1"}, "unknown_prefix", "`p-1`"),
        ({"type": "explain", "prompt": "x", "tenant": "x"}, "invalid_request", "no tenant 'x'"),
        ({"type": "explain", "prompt": "x", "salt": "x"}, "invalid_request", "no such field"),
        (
            {"type": "explain", "messages": [{"role": "user", "content": "x"}]},
            "invalid_request",
            "no chat template",
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_questions_that_cannot_be_answered(
    operator: RawClient, fields: dict[str, Any], code: str, message: str
):
    for _ in range(2):
        reply = operator.ask(id="a", **fields)
        assert (reply["type"], reply["id"], reply["code"]) == ("error", "a", code)
        assert message in reply["message"]
        assert not reply["retryable"]


def test_a_prompt_no_model_could_take_is_explained_all_the_same(operator: RawClient):
    reply = operator.ask(type="explain", id="a", prompt="never " * 20_000)
    assert (reply["type"], reply["prompt_tokens"]) == ("explained", 120_000)
    assert reply["cache"]["reason"] == "cold"


def test_a_storm_of_explanations(operator: RawClient):
    texts = ["x" * 10, "x" * 10_000]
    for number in range(100):
        operator.send(type="explain", id=f"e{number}", prompt=texts[number % 2])
        operator.send(type="cancel", id=f"c{number}", target=f"e{number}")
    replies = [operator.receive() for _ in range(200)]
    assert len({reply["id"] for reply in replies}) == 200
    ends = {(reply["type"], reply.get("code")) for reply in replies if reply["id"][0] == "e"}
    assert ends == {("explained", None), ("error", "cancelled")}
    assert operator.rest() == []


def test_pins_that_come_and_go_while_answers_are_written(
    admin: Client, client: RawClient, operator: RawClient
):
    alone = client.ask(id="alone", prompt="7" * 200, max_tokens=100, stream=False, **GREEDY)
    entry = admin.list().entries[0]
    assert entry.num_tokens == 299  # the last token's KV is never needed
    for number in range(8):
        client.send(id=f"{number}", prompt="7" * 200, max_tokens=100, stream=False, **GREEDY)
        for fields in ({"type": "pin", "ttl_s": 60}, {"type": "unpin"}, {"type": "unpin"}):
            operator.send(id=f"{number}", digest=entry.digest, **fields)
    pins = Counter(operator.receive()["type"] for _ in range(24))
    assert pins == {"pinned": 8, "unpinned": 8, "error": 8}
    answers = [client.receive() for _ in range(8)]
    assert {tuple(answer["token_ids"]) for answer in answers} == {tuple(alone["token_ids"])}


def test_more_pins_than_fit(admin: Client, client: RawClient):
    admin.evict(all=True)
    for letter in "pq":
        client.ask(id=letter, prompt=letter * 2500, max_tokens=1, **GREEDY)
    first, second = admin.list().entries
    kept = admin.pin(first.digest)
    assert kept.num_blocks == 40
    with pytest.raises(ServerError, match="neither number may exceed 63") as caught:
        admin.pin(second.digest)
    assert (caught.value.code, caught.value.retryable) == ("capacity", True)
    # What is pinned survives what needs the room, and is given up in the end.
    for letter in "rst":
        client.ask(id=letter, prompt=letter * 4000, max_tokens=1, **GREEDY)
    assert first.digest in {entry.digest for entry in admin.list().entries}
    assert second.digest not in {entry.digest for entry in admin.list().entries}
    again = client.ask(id="again", prompt="q" * 2500, max_tokens=1, **GREEDY)
    assert again["usage"]["cached_tokens"] == 2499


# --- prompts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"prompt": "x" * 10_000_000}, "too_large", "the limit is 4194304"),
        ({"prompt": "x" * 100_000}, "too_long", "the prompt has 100000 tokens"),
        ({"prompt": "x" * (MAX_PROMPT + 1)}, "too_long", "at most 4095"),
        ({"prompt_ids": [1] * 100_000}, "too_long", "the prompt has 100000 tokens"),
        ({"prompt_ids": [0, VOCAB]}, "invalid_request", "outside the vocabulary (0 to 256)"),
        ({"prompt_ids": [-1]}, "invalid_request", "`prompt_ids[0]`: expected an integer ≥ 0"),
        ({"prompt_ids": [2**40]}, "invalid_request", "expected an integer ≤ 2147483647"),
        ({"prompt": ""}, "invalid_request", "the prompt is empty"),
        ({"prompt_ids": []}, "invalid_request", "the prompt is empty"),
        ({}, "invalid_request", "exactly one of `prompt` and `prompt_ids`"),
        ({"prompt": "x", "prefix_id": "p-none"}, "unknown_prefix", "`p-none`"),
        ({"prompt": "x", "stop_token_ids": [VOCAB]}, "invalid_request", "outside the vocabulary"),
        ({"prompt": "x", "logit_bias": {"3": 1e9}}, "invalid_request", "≤ 100"),
        ({"prompt": "x", "logit_bias": {"9" * 5000: 1}}, "invalid_request", "in decimal"),
        (
            {"prompt": "x", "logit_bias": {str(i): 0 for i in range(1025)}},
            "invalid_request",
            "at most 1024 entries",
        ),
        ({"prompt": "x", "cache_priority": 101}, "invalid_request", "≤ 100"),
        ({"prompt": "x", "cache_priority": -1}, "invalid_request", "≥ 0"),
        ({"prompt": "x", "use_cache": "no"}, "invalid_request", "expected true or false"),
        ({"prompt": "x", "stop": [""]}, "invalid_request", "at least 1"),
        ({"prompt": "x", "stop": ["y" * 257]}, "invalid_request", "at most 256"),
        ({"prompt": "x", "stop": ["y"] * 17}, "invalid_request", "at most 16"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_requests_that_cannot_be_met(
    client: RawClient, fields: dict[str, Any], code: str, message: str
):
    reply = client.ask(id="a", **GREEDY | fields)
    assert (reply["type"], reply["id"], reply["code"]) == ("error", "a", code)
    assert message in reply["message"]
    assert not reply["retryable"]


def test_the_longest_prompt_has_room_for_one_token(client: RawClient):
    done = client.ask(id="a", prompt="x" * MAX_PROMPT, **GREEDY)
    assert (done["finish_reason"], done["usage"]["completion_tokens"]) == ("length", 1)


# --- answers --------------------------------------------------------------------------------------


def test_a_deadline_of_a_millisecond(client: RawClient):
    done = client.ask(id="a", prompt="x" * 3000, deadline_ms=1, **GREEDY)
    assert (done["type"], done["finish_reason"]) == ("done", "deadline")


def test_one_token(client: RawClient):
    done = client.ask(id="a", prompt="x", max_tokens=1, stream=False, **GREEDY)
    assert (done["finish_reason"], len(done["token_ids"])) == ("length", 1)


def test_stop_strings_of_all_kinds(client: RawClient):
    """The text before the first stop string, whatever that is and however the answer is sent."""
    asked = {"prompt": "x", "max_tokens": 30, **GREEDY}
    text = client.ask(id="whole", stream=False, **asked)["text"]
    for number, stop in enumerate([text[0], text[4:8], text[-1], text, text + "z", "\ufffd", "\0"]):
        for is_streamed in (False, True):
            client.send(id=f"{number}", stop=[stop, "never"], stream=is_streamed, **asked)
            pieces = [client.receive()]
            while pieces[-1]["type"] == "tokens":
                pieces.append(client.receive())
            assert "".join(piece["text"] for piece in pieces) == text.partition(stop)[0]
            assert pieces[-1].get("stop") == (stop if stop in text else None)


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 5e-324, "temperature": 1e-40, "logprobs": 2},
        {"repetition_penalty": 5e-324, "frequency_penalty": -2, "temperature": 100},
        {"top_p": 1e-300, "temperature": 1e-300, "min_p": 1, "top_k": 2**31 - 1, "logprobs": 20},
        {"logit_bias": {str(token): -100 for token in range(VOCAB)}, "temperature": 0},
        {"logit_bias": {"7": 100, "8": -100}, "presence_penalty": 2, "seed": 0, "logprobs": 0},
    ],
)
def test_extreme_sampling_costs_the_neighbour_nothing(
    client: RawClient, admin: Client, sampling: dict[str, Any]
):
    expected = client.ask(id="alone", prompt="neighbour", max_tokens=40, stream=False, **GREEDY)
    client.send(id="plain", prompt="neighbour", max_tokens=40, stream=False, **GREEDY)
    client.send(
        type="generate",
        id="odd",
        prompt="x",
        max_tokens=20,
        stream=False,
        ignore_eos=True,
        **sampling,
    )
    answers = {reply["id"]: reply for reply in (client.receive(), client.receive())}
    assert answers["plain"]["token_ids"] == expected["token_ids"]
    assert len(answers["odd"]["token_ids"]) == 20


# --- clients --------------------------------------------------------------------------------------


def test_the_same_id_twice(client: RawClient):
    client.send(id="t", prompt="x", max_tokens=4000, stream=False, **GREEDY)
    client.send(id="t", prompt="y", max_tokens=50, stream=False, **GREEDY)
    assert client.receive()["code"] == "duplicate_id"
    client.send(type="cancel", id="c", target="t")
    replies = {(reply := client.receive())["id"]: reply for _ in range(2)}
    assert replies["t"]["finish_reason"] == "cancelled"  # the first goes on until then
    assert client.ask(id="t", prompt="x", max_tokens=1, **GREEDY)["type"] == "done"


def test_a_storm_of_cancels(client: RawClient):
    for number in range(200):
        client.send(id=f"s{number}", prompt=f"{number}" * 30, max_tokens=3900, **GREEDY)
        client.send(type="cancel", id=f"c{number}", target=f"s{number}")
        client.send(type="cancel", id=f"n{number}", target="nothing")
    finals: Counter[str] = Counter()
    reasons = set()
    while finals.total() < 600:
        reply = client.receive()
        if reply["type"] != "tokens":
            finals[reply["id"]] += 1
            reasons.add(reply.get("finish_reason"))
    assert len(finals) == 600
    assert reasons == {None, "cancelled"}
    assert client.rest() == []


def test_a_cancel_while_the_text_is_still_being_read(client: RawClient):
    client.send(id="long", prompt="x" * 1_500_000, **GREEDY)  # takes a second
    client.send(type="cancel", id="c", target="long")
    done, ok = client.receive(), client.receive()
    assert (done["id"], done["finish_reason"], ok["type"]) == ("long", "cancelled", "ok")


def test_clients_that_vanish(daemon: DaemonProcess, admin: Client):
    def visit() -> None:
        for number in range(200):
            with RawClient(daemon.endpoint) as client:
                client.send(id="v", prompt=f"{number}" * 50, max_tokens=3000, **GREEDY)
                client.receive()

    visit()
    settle(admin)
    before_mib = resident_mib(daemon)
    visit()
    settle(admin)
    assert resident_mib(daemon) < before_mib + 24


def test_who_takes_the_name_of_a_client_that_has_gone_reads_nothing_of_its_answer(
    daemon: DaemonProcess, admin: Client
):
    def num_gone() -> int:
        number: int = admin.stats()["ipc"]["user"]["clients_gone"]
        return number

    before = num_gone()
    with RawClient(daemon.endpoint, name=b"mine") as first:
        first.send(id="secret", prompt="x", max_tokens=4000, **GREEDY)
        first.receive()
    is_heard = False
    while not is_heard:  # libzmq hears nobody who comes before it has let go of the name
        with RawClient(daemon.endpoint, name=b"mine") as second:
            second.send(type="ping", id="p")
            wait_until(lambda: num_gone() > before)
            second.socket.poll(200)
            heard = [reply["id"] for reply in second.rest()]
            is_heard = bool(heard)
            assert heard == ["p"] * is_heard


def test_clients_that_ask_and_never_read(daemon: DaemonProcess, admin: Client):
    with ExitStack() as stack:
        for _ in range(20):
            mute = stack.enter_context(RawClient(daemon.endpoint, zmq.REQ))
            mute.send(id="q", prompt="x", max_tokens=50, **GREEDY)
        with RawClient(daemon.endpoint, zmq.REQ) as polite:
            assert polite.ask(id="q", prompt="x", max_tokens=50, **GREEDY)["type"] == "done"
        settle(admin)


# --- prefixes -------------------------------------------------------------------------------------


def test_a_prefix_that_leaves_no_room(admin: Client):
    with pytest.raises(ServerError, match="at most 4095") as caught:
        admin.register("y" * 4096)
    assert caught.value.code == "too_long"


def test_more_prefixes_than_fit(admin: Client, client: RawClient):
    kept = admin.register("a" * 4000)
    with pytest.raises(
        ServerError,
        match="registrations, pins and leases: 1, blocks they hold: 63; neither number may",
    ) as caught:
        admin.register("b" * 4000)
    assert caught.value.code == "capacity"
    done = client.ask(id="a", prompt="c" * 2000, max_tokens=3, **GREEDY)
    assert done["finish_reason"] == "length"
    done = client.ask(id="b", prompt="d", prefix_id=kept.prefix_id, max_tokens=3, **GREEDY)
    assert (done["usage"]["prompt_tokens"], done["usage"]["cached_tokens"]) == (4001, 4000)


def test_a_released_prefix(admin: Client, client: RawClient):
    prefix_id = admin.register("z" * 100).prefix_id
    admin.release(prefix_id)
    reply = client.ask(id="a", prompt="x", prefix_id=prefix_id, **GREEDY)
    assert reply["code"] == "unknown_prefix"
    with pytest.raises(ServerError, match="is registered"):
        admin.release(prefix_id)


def test_evict_while_answers_are_written(admin: Client, client: RawClient):
    alone = client.ask(id="alone", prompt="0" * 200, max_tokens=200, stream=False, **GREEDY)
    for number in range(16):
        client.send(id=f"{number}", prompt="0" * 200, max_tokens=200, stream=False, **GREEDY)
    for _ in range(50):
        admin.evict(all=True)
    answers = [client.receive() for _ in range(16)]
    assert {tuple(answer["token_ids"]) for answer in answers} == {tuple(alone["token_ids"])}
