"""A client whose daemon says anything at all: every call ends, with an answer or an error."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import pytest

from ipc.answers import Answer
from ipc.codec import Encoding, decode_reply, encode
from ipc.errors import IpcError, ProtocolError
from ipc.messages import (
    AnyReply,
    Done,
    Generate,
    GetInfo,
    ListEntries,
    MessageId,
    Ping,
    Register,
    Tokens,
)
from ipc.session import Call, Session
from tests.support.mutations import Corpus, mutated_from

CORPUS = Corpus()
REPLIES = [decode_reply(frame) for frame in CORPUS.replies]
REQUESTS = (
    (Generate, {"prompt": "x"}),
    (Ping, {}),
    (GetInfo, {}),
    (Register, {"text": "x"}),
    (ListEntries, {}),
)


def frames(chance: random.Random, calls: list[Call]) -> Iterator[bytes]:
    """What a confused daemon sends: to these calls, to no call, and what is no message at all."""
    while True:
        reply: AnyReply = chance.choice(REPLIES)
        name = chance.choice([call.id for call in calls] + [MessageId("999")])
        frame = encode(msgspec.structs.replace(reply, id=name), chance.choice(list(Encoding)))
        yield mutated_from(chance, frame, CORPUS) if chance.random() < 0.3 else frame


def read(call: Call, answer: Answer) -> IpcError | None:
    """Take what there is, as the clients do; how the call failed, if it did."""
    try:
        while (reply := call.take()) is not None:
            if isinstance(reply, Tokens | Done):
                answer.add(reply)
    except IpcError as error:
        return error
    return None


@pytest.mark.parametrize("seed", range(40))
def test_every_call_ends(seed: int) -> None:
    chance = random.Random(seed)
    session = Session()
    calls = [
        session.start(kind, fields, 4 if kind is Generate else None)
        for kind, fields in (*REQUESTS, *REQUESTS)
    ]
    session.probe()
    answers = {call.id: Answer() for call in calls}
    ends: dict[str, IpcError] = {}
    saying = frames(chance, calls)
    for _ in range(300):
        for call in session.receive(next(saying)):
            if (error := read(call, answers[call.id])) is not None:
                ends.setdefault(call.id, error)
            session.grant(call)
    assert not {call.id for call in session.open_calls} & set(ends)
    session.fail_all(ProtocolError("enough"))
    for call in calls:
        assert call.is_finished
