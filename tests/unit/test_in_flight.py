"""What libzmq may hold of large messages, at its bound."""

from __future__ import annotations

from dataclasses import dataclass

from ipc.in_flight import MAX_BYTES, InFlight


@dataclass
class Message:
    done: bool = False


def test_room_up_to_the_bound() -> None:
    in_flight = InFlight()
    assert in_flight.has_room(b"a", MAX_BYTES + 1)  # whatever its size, if there is no other
    in_flight.add(b"a", Message(), 1000)
    assert in_flight.has_room(b"a", MAX_BYTES - 1000)
    assert not in_flight.has_room(b"a", MAX_BYTES - 999)
    assert in_flight.has_room(b"b", MAX_BYTES)


def test_what_libzmq_lets_go_of_makes_room() -> None:
    in_flight = InFlight()
    first, second = Message(), Message()
    in_flight.add(b"a", first, 10)
    in_flight.add(b"a", second, 20)
    assert in_flight.num_bytes(b"a") == 30
    second.done = True  # it goes after the first one
    assert in_flight.num_bytes(b"a") == 30
    first.done = True
    assert in_flight.num_bytes(b"a") == 0


def test_a_client_that_has_gone_is_forgotten() -> None:
    in_flight = InFlight()
    in_flight.add(b"a", Message(), MAX_BYTES)
    in_flight.forget(b"a")
    in_flight.forget(b"a")
    assert in_flight.num_bytes(b"a") == 0
