"""CURVE on a server of this process: what decides, and that nothing that fails lets anybody in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import zmq

from ipc.auth import Curve, Principal
from ipc.client import Client
from ipc.curve_keys import CurveKeys, KeyPair
from ipc.dealer import Dealer
from ipc.errors import EndpointError, NotWelcome, ServerError
from ipc.server import Server
from tests.support.ipc_daemon import LOOPS, CountingDaemon, run_on

Run = Callable[[Coroutine[Any, Any, None]], None]


def new_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


class Keys:
    """An authority that can be changed, and that can fail."""

    def __init__(self) -> None:
        self.server, self.user, self.admin, self.stranger = (new_pair() for _ in range(4))
        self.principals = {
            self.user.public: Principal(self.user.public, "user", "user", "alice"),
            self.admin.public: Principal(self.admin.public, "admin", "admin"),
        }
        self.error: Exception | None = None

    def find(self, key: str) -> Principal | None:
        if self.error is not None:
            raise self.error
        return self.principals.get(key)

    def curve(self) -> Curve:
        return Curve(self.server, self)

    def of(self, pair: KeyPair) -> CurveKeys:
        return CurveKeys(self.server.public, pair)


@pytest.fixture(params=sorted(LOOPS))
def run(request: pytest.FixtureRequest) -> Run:
    return partial(run_on, request.param)


@pytest.fixture
def keys() -> Keys:
    return Keys()


def serve(daemon: CountingDaemon, keys: Keys, **options: Any) -> Server:
    return daemon.serve("tcp://127.0.0.1:*", curve=keys.curve(), **options)


async def is_refused(server: Server, curve: CurveKeys | None) -> bool:
    async with Client(server.endpoint, curve=curve) as client:
        try:
            await client.ping()
        except NotWelcome:
            return True
        return False


def test_role_tenant_and_name_are_those_of_the_key(run: Run, keys: Keys) -> None:
    async def scene() -> None:
        daemon = CountingDaemon()
        async with serve(daemon, keys) as server:
            for pair in (keys.user, keys.admin):
                async with Client(server.endpoint, curve=keys.of(pair)) as client:
                    await client.ping()
            refs = [client for client, _ in daemon.seen]
            assert [(ref.role, ref.tenant, ref.key, ref.socket) for ref in refs] == [
                ("user", "alice", "user", "user"),
                ("admin", "", "admin", "user"),
            ]
            async with Client(server.endpoint, curve=keys.of(keys.user)) as client:
                with pytest.raises(ServerError, match="from administrators' keys only"):
                    await client.stats()
            async with Client(server.endpoint, curve=keys.of(keys.admin)) as client:
                assert await client.stats()

    run(scene())


def test_tcp_without_curve_is_refused(run: Run, keys: Keys) -> None:
    with pytest.raises(EndpointError, match="TCP needs CURVE, or --insecure-tcp"):
        CountingDaemon().serve("tcp://127.0.0.1:*")


def test_strangers_are_refused_and_the_log_hook_hears_of_it(run: Run, keys: Keys) -> None:
    async def scene() -> None:
        daemon = CountingDaemon()
        async with serve(daemon, keys) as server:
            for _ in range(3):
                assert await is_refused(server, keys.of(keys.stranger))
            lines = [fields for event, fields in daemon.log if event == "key_refused"]
            assert lines[0] == {"domain": "rtcached.user.", "key": keys.stranger.public}
            assert len(lines) >= 3  # libzmq tries again by itself
            assert not await is_refused(server, keys.of(keys.user))
        assert [client.key for client, _ in daemon.seen] == ["user"]

    run(scene())


def wait_until_refused(dealer: Dealer) -> None:
    """libzmq then has nowhere left to put a message; its news are not read."""
    while dealer.socket.poll(0, zmq.POLLOUT):
        pass


def test_what_is_sent_behind_a_refusal_ends_with_it(run: Run, keys: Keys) -> None:
    async def scene() -> None:
        async with serve(CountingDaemon(), keys) as server:
            with closing(Dealer(server.endpoint, curve=keys.of(keys.stranger))) as dealer:
                await asyncio.to_thread(wait_until_refused, dealer)
                dealer.send(b"nobody gets it")
                assert not dealer.has_broken()
                assert dealer.refusal == "its key is not in the daemon's list of keys"

    run(scene())


def test_a_check_that_fails_lets_nobody_in_and_harms_no_later_one(run: Run, keys: Keys) -> None:
    async def scene() -> None:
        daemon = CountingDaemon()
        async with serve(daemon, keys) as server:
            keys.error = RuntimeError("no keys today")
            assert await is_refused(server, keys.of(keys.user))
            keys.error = None
            assert not await is_refused(server, keys.of(keys.user))
        assert ("handler_failed", {"where": "key_check"}) in [
            (event, {name: fields[name] for name in fields if name != "error"})
            for event, fields in daemon.log
        ]

    run(scene())


def test_without_an_answer_nobody_gets_in(run: Run, keys: Keys) -> None:
    async def scene() -> None:
        daemon = CountingDaemon()
        async with serve(daemon, keys) as server:
            assert server._zap is not None
            server._zap.stop()
            async with Client(server.endpoint, curve=keys.of(keys.user), timeout_s=1) as client:
                with pytest.raises(Exception, match=r"tcp://"):
                    await client.ping()
        assert daemon.seen == []

    run(scene())


def test_a_key_that_was_removed_is_refused_at_its_next_message(run: Run, keys: Keys) -> None:
    async def scene() -> None:
        daemon = CountingDaemon()
        async with (
            serve(daemon, keys) as server,
            Client(server.endpoint, curve=keys.of(keys.user)) as client,
        ):
            await client.ping()
            del keys.principals[keys.user.public]
            with pytest.raises(ServerError, match="is not in the daemon's list of keys any more"):
                await client.ping()
            assert len(daemon.seen) == 1
            # And when it is told, the connection is cut, and its handler hears of it.
            assert server.expel() == 1
            assert [ref.key for ref in daemon.gone] == [""]
            with pytest.raises(NotWelcome):
                await client.ping()
            assert server.expel() == 0

    run(scene())


def test_what_changes_of_a_key_cuts_its_connections_only(run: Run, keys: Keys) -> None:
    async def scene() -> None:
        daemon = CountingDaemon()
        async with (
            serve(daemon, keys) as server,
            Client(server.endpoint, curve=keys.of(keys.user)) as user,
            Client(server.endpoint, curve=keys.of(keys.admin)) as admin,
        ):
            await user.ping()
            await admin.ping()
            assert server.expel() == 0
            changed = replace(keys.principals[keys.user.public], tenant="bob")
            keys.principals[keys.user.public] = changed
            assert server.expel() == 1
            assert [ref.tenant for ref in daemon.gone] == ["alice"]
            await user.ping()  # it comes back by itself
            await admin.ping()
            assert [client.tenant for client, _ in daemon.seen] == ["alice", "", "bob", ""]

    run(scene())


@pytest.mark.parametrize(
    ("role", "tenant", "welcome"),
    [("admin", "", {"admin"}), ("user", "alice", {"user", "admin"}), ("user", "bob", {"admin"})],
)
def test_a_socket_takes_only_its_own(
    run: Run, keys: Keys, role: str, tenant: str, welcome: set[str]
) -> None:
    async def scene() -> None:
        async with serve(CountingDaemon(), keys, role=role, tenant=tenant) as server:
            pairs = {"user": keys.user, "admin": keys.admin, "stranger": keys.stranger}
            answers = await asyncio.gather(
                *(is_refused(server, keys.of(pair)) for pair in pairs.values())
            )
            found = {name for name, no in zip(pairs, answers, strict=True) if not no}
            assert found == welcome

    run(scene())


def test_a_server_of_curve_closes_whole_and_may_start_again(run: Run, keys: Keys) -> None:
    async def scene() -> None:
        for _ in range(3):
            async with serve(CountingDaemon(), keys) as server:
                assert not await is_refused(server, keys.of(keys.user))

    run(scene())
