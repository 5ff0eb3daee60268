"""Registrations, pins and leases: what they hold, how much, for how long."""

from __future__ import annotations

import pytest

from runtime_cache.cache import desk, invariants
from runtime_cache.cache.keeps import Keeps
from runtime_cache.cache.results import Keep, KeepKind
from runtime_cache.errors import InvalidRequest, UnknownEntry
from runtime_cache.ids import BlockId, PrefixId
from tests.support.caching import (
    MakeCache,
    admit,
    admitted,
    chain_of,
    commit,
    computed,
    digests_of,
    entries,
    gauges,
    num_cached,
    parked_blocks,
    register,
    serve,
)

P = PrefixId("p")
Q = PrefixId("q")


def block_ids(*blocks: int) -> tuple[BlockId, ...]:
    return tuple(map(BlockId, blocks))


def keep_of(
    name: str, *blocks: int, kind: KeepKind = "registration", expires_s: float | None = None
) -> Keep:
    return Keep(name, kind, "", 4 * len(blocks), block_ids(*blocks), 0.0, expires_s)


# -- the book -----------------------------------------------------------------------------------


def test_shared_blocks_count_once() -> None:
    keeps = Keeps(9)
    for keep in (keep_of("p", 1, 2), keep_of("q", 1, 3), keep_of("d", 1, 2, kind="pin")):
        assert keeps.add(keep) is None
    assert (len(keeps), keeps.num_registrations, keeps.num_blocks) == (3, 2, 3)
    assert [keep.name for keep in keeps] == ["p", "q", "d"]


def test_a_name_is_kept_once_and_a_pin_and_a_lease_are_the_same() -> None:
    keeps = Keeps(9)
    pin, lease = keep_of("d", 1, kind="pin"), keep_of("d", 1, kind="lease", expires_s=5.0)
    registration = keep_of("d", 2)
    assert keeps.add(pin) is None
    assert keeps.add(registration) is None
    assert keeps.add(lease) is pin
    assert (keeps.get("pin", "d"), keeps.get("lease", "d")) == (lease, lease)
    assert keeps.get("registration", "d") is registration
    assert keeps.pop("pin", "d") is lease
    assert keeps.pop("pin", "d") is None
    assert [*keeps] == [registration]


@pytest.mark.parametrize(
    ("blocks", "has_room"), [((1, 2), True), ((1, 4), True), ((4,), True), ((4, 5), False)]
)
def test_so_many_blocks_may_be_held(blocks: tuple[int, ...], has_room: bool) -> None:
    keeps = Keeps(4)
    keeps.add(keep_of("p", 1, 2, 3))
    assert keeps.has_room(keep_of("q", *blocks)) == has_room


def test_what_is_replaced_gives_its_room() -> None:
    keeps = Keeps(3)
    keeps.add(keep_of("p", 1, 2))
    assert keeps.has_room(keep_of("p", 3, 4, 5))
    assert not keeps.has_room(keep_of("p", 3, 4, 5, 6))
    keeps.add(keep_of("q", 2))
    assert not keeps.has_room(keep_of("p", 3, 4, 5))
    assert keeps.has_room(keep_of("p", 2, 4, 5))


def test_so_many_keeps_there_may_be_also_of_nothing() -> None:
    keeps = Keeps(2)
    assert keeps.add(keep_of("p")) is None
    assert keeps.has_room(keep_of("q"))
    keeps.add(keep_of("q"))
    assert not keeps.has_room(keep_of("r"))
    assert keeps.has_room(keep_of("q"))
    assert not Keeps(0).has_room(keep_of("p"))


@pytest.mark.parametrize(
    ("now_s", "names"), [(4.9, []), (5.0, ["a"]), (5.1, ["a"]), (7.0, ["a", "b"])]
)
def test_leases_end_at_their_time(now_s: float, names: list[str]) -> None:
    keeps = Keeps(9)
    keeps.add(keep_of("b", 1, kind="lease", expires_s=7.0))
    keeps.add(keep_of("a", 2, kind="lease", expires_s=5.0))
    keeps.add(keep_of("c", 3, kind="pin"))
    keeps.add(keep_of("p", 4))
    assert sorted(keep.name for keep in keeps.expired(now_s)) == names
    assert len(keeps) == 4  # that is for the caller


def test_the_next_end_follows_what_comes_and_goes() -> None:
    keeps = Keeps(9)
    assert keeps.next_expiry_s is None
    keeps.add(keep_of("a", 1, kind="lease", expires_s=5.0))
    keeps.add(keep_of("b", 1, kind="lease", expires_s=3.0))
    assert keeps.next_expiry_s == 3.0
    keeps.add(keep_of("b", 1, kind="lease", expires_s=9.0))
    assert keeps.next_expiry_s == 5.0
    keeps.add(keep_of("a", 1, kind="pin"))
    assert keeps.next_expiry_s == 9.0
    keeps.pop("lease", "b")
    assert keeps.next_expiry_s is None


# -- registrations ------------------------------------------------------------------------------


def test_a_registered_prefix_is_never_evicted(make_cache: MakeCache) -> None:
    cache = make_cache(6)
    keep = register(cache, P, range(8))
    assert keep == Keep(P, "registration", digests_of(range(8))[1], 8, block_ids(1, 2), 0.0)
    assert [*cache.keeps] == [keep]
    assert gauges(cache) == (2, 0, 3)
    assert desk.plan_blocks(cache, None).carry_out(cache) == (0, 0, 2)
    assert desk.plan_entry(cache, keep.digest).carry_out(cache) == (0, 0, 2)
    assert admit(cache, range(20, 33)) is None
    assert admitted(cache, range(9)).num_hit_tokens == 8


@pytest.mark.parametrize(("num_tokens", "blocks"), [(1, (1,)), (3, (1,)), (4, (1,)), (6, (1, 2))])
def test_a_registration_holds_its_last_partly_filled_block_too(
    make_cache: MakeCache, num_tokens: int, blocks: tuple[int, ...]
) -> None:
    cache = make_cache(8)
    keep = register(cache, P, range(num_tokens))
    assert keep is not None
    assert (keep.num_tokens, keep.blocks) == (num_tokens, blocks)
    assert gauges(cache)[0] == len(blocks)
    desk.plan_blocks(cache, None).carry_out(cache)
    assert num_cached(cache, range(num_tokens)) == num_tokens


def test_a_released_prefix_stays_cached_until_evicted(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    register(cache, P, range(9))
    assert cache.unregister(P)
    assert not cache.unregister(P)
    assert (len(cache.keeps), parked_blocks(cache)) == (0, [3, 2, 1])


def test_registering_again_changes_nothing(make_cache: MakeCache) -> None:
    cache = make_cache(10)
    first = register(cache, P, range(9))
    before = gauges(cache), parked_blocks(cache), [n.digest for n in cache.index]
    assert register(cache, P, range(9)) == first
    assert (gauges(cache), parked_blocks(cache), [n.digest for n in cache.index]) == before
    assert [cache.pool.num_holds(BlockId(b)) for b in (1, 2, 3)] == [1, 1, 1]
    assert cache.counters.duplicate_blocks == 0


def test_two_registrations_share_their_beginning(make_cache: MakeCache) -> None:
    cache = make_cache(10)
    register(cache, P, range(8))
    register(cache, Q, range(4))
    assert (cache.keeps.num_blocks, cache.pool.num_holds(BlockId(1))) == (2, 2)
    assert cache.unregister(P)
    assert (cache.num_live, parked_blocks(cache)) == (1, [2])
    assert cache.unregister(Q)
    assert parked_blocks(cache) == [2, 1]


def test_registering_other_tokens_replaces(make_cache: MakeCache) -> None:
    cache = make_cache(10)
    register(cache, P, range(4))
    register(cache, P, range(20, 26))
    assert [(k.name, k.num_tokens, k.blocks) for k in cache.keeps] == [(P, 6, (2, 3))]
    assert parked_blocks(cache) == [1]


def test_a_registration_within_a_longer_block_holds_that_one(make_cache: MakeCache) -> None:
    cache = make_cache(10)
    serve(cache, range(8))
    keep = register(cache, P, range(6))
    assert keep is not None
    assert (keep.num_tokens, keep.blocks) == (6, (1, 2))
    assert keep.digest == digests_of(range(8))[1]
    assert cache.counters.inserted_blocks == 2


def test_a_registration_that_copies_nothing_is_complete_at_once(make_cache: MakeCache) -> None:
    cache = make_cache(10)
    serve(cache, range(7))
    chain = chain_of(range(7))
    table = cache.admit(chain, num_tokens=7, max_tokens=7, max_hit_tokens=7, is_kept=True)
    assert table is not None
    assert (table.num_hit_tokens, table.copy) == (7, (2, 3))
    cache.commit(table, chain, 7, is_tail=True)
    keep = cache.register(P, table)
    assert keep is not None
    assert keep.blocks == (1, 2)
    assert cache.pool.num_holds(BlockId(2)) == 2
    invariants.check(cache, [table])
    cache.release(table)
    assert (gauges(cache), cache.pool.num_holds(BlockId(2))) == ((2, 0, 7), 1)


@pytest.mark.parametrize(("limit", "is_taken"), [(2, False), (3, True)])
def test_registrations_hold_up_to_their_limit(
    make_cache: MakeCache, limit: int, is_taken: bool
) -> None:
    cache = make_cache(10, max_kept_blocks=limit)
    register(cache, P, range(8))
    table = computed(cache, [*range(4), *range(30, 34)])  # shares a block with the first
    before = gauges(cache), [*cache.keeps]
    assert (cache.register(Q, table) is not None) == is_taken
    assert cache.keeps.num_blocks == (3 if is_taken else 2)
    if not is_taken:
        assert (gauges(cache), [*cache.keeps]) == before


def test_a_replaced_registration_does_not_count_twice(make_cache: MakeCache) -> None:
    cache = make_cache(6)
    assert cache.keeps.max_blocks == 2
    register(cache, P, range(8))
    assert register(cache, P, range(20, 28)) is not None
    assert [k.blocks for k in cache.keeps] == [(3, 4)]
    assert register(cache, Q, range(4)) is None
    assert parked_blocks(cache) == [2, 1]


# -- pins and leases ----------------------------------------------------------------------------


def test_a_pin_holds_a_prefix_until_it_is_given_up(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    cache.now_s = 7.0
    serve(cache, range(12))
    first, second, _ = digests_of(range(12))
    keep = desk.pin(cache, second, None)
    assert keep == Keep(second, "pin", second, 8, block_ids(1, 2), 7.0)
    assert (gauges(cache), parked_blocks(cache)) == ((2, 1, 4), [3])
    assert desk.plan_blocks(cache, None).carry_out(cache) == (1, 0, 2)
    assert admit(cache, range(50, 74)) is None
    with pytest.raises(UnknownEntry, match="nothing pinned or leased has"):
        desk.unpin(cache, first)
    assert desk.unpin(cache, second) == keep
    assert parked_blocks(cache) == [2, 1]
    with pytest.raises(UnknownEntry):
        desk.unpin(cache, second)


@pytest.mark.parametrize(("now_s", "num_live"), [(19.9, 1), (20.0, 0), (20.1, 0)])
def test_a_lease_ends_exactly_at_its_time(
    make_cache: MakeCache, now_s: float, num_live: int
) -> None:
    cache = make_cache(6)
    cache.now_s = 5.0
    serve(cache, range(4))
    keep = desk.pin(cache, digests_of(range(4))[0], 15.0)
    assert keep is not None
    assert (keep.kind, keep.expires_s, cache.keeps.next_expiry_s) == ("lease", 20.0, 20.0)
    cache.now_s = now_s
    cache.expire()
    assert (cache.num_live, len(cache.keeps)) == (num_live, num_live)
    assert (cache.keeps.next_expiry_s is None) == (num_live == 0)


def test_several_leases_end_together_tail_first(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    serve(cache, range(12))
    for digest, ttl_s in zip(digests_of(range(12)), (3.0, 2.0, 1.0), strict=True):
        desk.pin(cache, digest, ttl_s)
    cache.now_s = 2.0
    cache.expire()
    assert (gauges(cache), parked_blocks(cache)) == ((1, 2, 4), [3, 2])
    cache.now_s = 3.0
    cache.expire()
    assert parked_blocks(cache) == [3, 2, 1]


def test_pinning_again_changes_how_long(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    serve(cache, range(4))
    (digest,) = digests_of(range(4))
    orders = [
        (5.0, "lease", 5.0),
        (3.0, "lease", 3.0),
        (None, "pin", None),
        (9.0, "pin", None),  # what was promised until it is unpinned stays so long
    ]
    for ttl_s, kind, expires_s in orders:
        keep = desk.pin(cache, digest, ttl_s)
        assert keep is not None
        assert (keep.kind, keep.expires_s) == (kind, expires_s)
        assert (len(cache.keeps), cache.pool.num_holds(BlockId(1))) == (1, 1)
        assert cache.keeps.next_expiry_s == expires_s
    cache.now_s = 9.0
    cache.expire()
    assert desk.unpin(cache, digest).kind == "pin"
    lease = desk.pin(cache, digest, 9.0)
    assert lease is not None
    assert lease.kind == "lease"


def test_what_is_kept_again_is_never_given_up_between(make_cache: MakeCache) -> None:
    cache = make_cache(9, low_watermark_blocks=8)  # whatever nobody holds goes at once
    register(cache, P, range(8))
    assert register(cache, P, range(8)) is not None
    for _ in range(2):
        assert desk.pin(cache, digests_of(range(8))[1], None) is not None
        cache.unregister(P)
    assert (gauges(cache), num_cached(cache, range(8))) == ((2, 0, 6), 8)


@pytest.mark.parametrize(("limit", "is_taken"), [(1, False), (2, True)])
def test_a_pin_without_room_changes_nothing(
    make_cache: MakeCache, limit: int, is_taken: bool
) -> None:
    cache = make_cache(8, max_kept_blocks=limit)
    serve(cache, range(8))
    before = gauges(cache), parked_blocks(cache)
    assert (desk.pin(cache, digests_of(range(8))[1], None) is not None) == is_taken
    assert ((gauges(cache), parked_blocks(cache)) == before) != is_taken
    assert desk.pin(cache, digests_of(range(8))[0], None) is not None  # replaces nothing


def test_registrations_and_pins_have_one_limit(make_cache: MakeCache) -> None:
    cache = make_cache(8, max_kept_blocks=2)
    serve(cache, range(4))
    register(cache, P, range(10, 14))
    assert desk.pin(cache, digests_of(range(4))[0], None) is not None
    assert register(cache, Q, range(20, 24)) is None
    assert register(cache, Q, range(10, 14)) is None  # a third one, if of no further block
    assert cache.unregister(P)
    assert register(cache, Q, range(20, 24)) is not None


def test_a_pin_is_given_up_by_the_beginning_of_its_digest(make_cache: MakeCache) -> None:
    cache = make_cache(40)
    for number in range(17):
        serve(cache, range(10 * number, 10 * number + 4))
        desk.pin(cache, digests_of(range(10 * number, 10 * number + 4))[0], None)
    names = [keep.name for keep in cache.keeps]
    digit = max((name[0] for name in names), key=[name[0] for name in names].count)
    with pytest.raises(InvalidRequest, match=f"digests begin with `{digit}`"):
        desk.unpin(cache, digit)
    assert len(cache.keeps) == 17
    for name in names:
        assert desk.unpin(cache, name[:16]).name == name
    assert cache.num_live == 0


def test_a_pin_of_an_answer_that_goes_on_holds_what_it_became(make_cache: MakeCache) -> None:
    cache = make_cache(10)
    table = computed(cache, range(6), room=6)  # 1, 2
    tail = table.tail
    assert tail is not None
    keep = desk.pin(cache, tail.digest.hex(), 5.0)
    assert keep is not None
    assert cache.reserve(table, 9)
    commit(cache, table, range(9))
    cache.release(table)
    assert (gauges(cache), parked_blocks(cache)) == ((2, 1, 6), [3])
    cache.now_s = 5.0
    cache.expire()
    assert parked_blocks(cache) == [3, 2, 1]


def test_a_lease_ends_while_its_block_is_to_be_copied(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    serve(cache, range(6))
    node = cache.index.node_of(BlockId(2))
    assert node is not None
    desk.pin(cache, node.digest.hex(), 5.0)
    reader = admitted(cache, [*range(6), 60])
    cache.now_s = 5.0
    cache.expire()
    desk.plan_blocks(cache, None).carry_out(cache)
    assert (reader.copy, cache.pool.num_holds(BlockId(2))) == ((2, 2), 1)
    invariants.check(cache, [reader])
    cache.copied(reader)
    assert parked_blocks(cache) == [2]


def test_keeps_and_requests_give_back_in_any_order(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    table = computed(cache, range(10))  # 1, 2, 3
    desk.pin(cache, digests_of(range(8))[1], None)  # 1, 2
    register(cache, P, range(4))  # 1
    cache.unregister(P)
    assert parked_blocks(cache) == []
    cache.release(table)
    assert parked_blocks(cache) == [3]
    register(cache, P, range(8))
    desk.unpin(cache, digests_of(range(8))[1])
    assert parked_blocks(cache) == [3]
    cache.unregister(P)
    assert parked_blocks(cache) == [3, 2, 1]


def test_a_registration_covered_by_a_longer_one_is_as_long_as_it_was_asked_for(
    make_cache: MakeCache,
) -> None:
    cache = make_cache(12)
    for prefix_id, num_tokens in ((P, 7), (Q, 6)):
        keep = register(cache, prefix_id, range(num_tokens))
        assert keep is not None
        assert (keep.num_tokens, len(keep.blocks)) == (num_tokens, 2)
    assert sorted(entry.num_tokens for entry in entries(cache)[0]) == [6, 7]
