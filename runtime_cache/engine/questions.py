"""What operators ask of the caches, and the answers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, islice

from runtime_cache.cache import desk, verification
from runtime_cache.cache.block_table import BlockTable
from runtime_cache.cache.manager import CacheManager
from runtime_cache.cache.results import Evicted, ShownEntry
from runtime_cache.engine.commands import (
    Report,
    ReportEvicted,
    ReportExplained,
    ReportJudged,
    ReportPinned,
    ReportRefused,
    ReportReleased,
    ReportShown,
    ReportToRead,
    ReportUnpinned,
)
from runtime_cache.engine.events import (
    BlockRead,
    EvictAsked,
    ExplainAsked,
    PinAsked,
    PrefixReleased,
    Question,
    ShowAsked,
    UnpinAsked,
    VerifyAsked,
)
from runtime_cache.errors import (
    CapacityError,
    InvalidRequest,
    RequestError,
    UnknownEntry,
    UnknownPrefix,
)
from runtime_cache.ids import BlockId, PrefixId, TenantName

Caches = Mapping[TenantName, CacheManager]


def answer(
    caches: Caches, question: Question, *, tables: Sequence[BlockTable], retry_after_ms: int
) -> Report:
    """Do what is asked, or say why not; then nothing has changed.

    Args:
        tables: of all live requests.
        retry_after_ms: when to ask again for what there is no room for now.
    """
    try:
        if isinstance(question, EvictAsked):
            return ReportEvicted(_evict(caches, question))
        if isinstance(question, VerifyAsked):
            return _to_read(caches, question)
        if isinstance(question, BlockRead):
            cache = _owner(caches, question.reading.node.block)
            return ReportJudged(verification.judge(cache, question.reading, tables))
        cache = _cache_of(caches, question.tenant)
        if isinstance(question, PinAsked):
            return _pin(cache, question, retry_after_ms)
        return _answer(cache, question)
    except (UnknownEntry, UnknownPrefix) as error:
        text = error.message + elsewhere(_others(caches, question))
        return ReportRefused(error.code, text, error.retryable, error.retry_after_ms)
    except (RequestError, CapacityError) as error:
        return ReportRefused(error.code, error.message, error.retryable, error.retry_after_ms)


def elsewhere(tenants: Iterable[TenantName]) -> str:
    """What operators are told besides when tenants they did not name have what they look for."""
    names = sorted(tenants)
    if not names:
        return ""
    if not names[0]:
        return "; the default tenant has one: without --tenant"
    return f"; tenant `{names[0]}` has one: --tenant {names[0]}"


def _others(caches: Caches, question: Question) -> list[TenantName]:
    """Tenants besides the one that was named that have what is looked for."""
    if isinstance(question, BlockRead):
        return []
    others = (tenant for tenant in caches if tenant != question.tenant)
    return [tenant for tenant in others if _has(caches[tenant], question)]


def _has(cache: CacheManager, question: Question) -> bool:
    match question:
        case UnpinAsked(name):
            pins = (keep for keep in cache.keeps if keep.kind != "registration")
            return any(pin.name.startswith(name) for pin in pins)
        case ShowAsked(prefix_id=str(name)):
            registered = (keep for keep in cache.keeps if keep.kind == "registration")
            return any(keep.name.startswith(name) for keep in registered)
        case (
            ShowAsked(digest=str(name))
            | PinAsked(digest=name)
            | EvictAsked(digest=str(name))
            | VerifyAsked(digest=str(name))
        ):
            return any(node.digest.hex().startswith(name) for node in cache.index)
    return False


def _cache_of(caches: Caches, tenant: TenantName) -> CacheManager:
    if tenant not in caches:
        raise InvalidRequest(f"there is no tenant `{tenant}`")
    return caches[tenant]


def _pin(cache: CacheManager, question: PinAsked, retry_after_ms: int) -> ReportPinned:
    keep = desk.pin(cache, question.digest, question.ttl_s)
    if keep is None:
        raise CapacityError(full(cache), retry_after_ms=retry_after_ms)
    return ReportPinned(keep)


def full(cache: CacheManager) -> str:
    """Why nothing more can be kept."""
    keeps = cache.keeps
    return (
        f"registrations, pins and leases: {len(keeps)}, blocks they hold: {keeps.num_blocks}; "
        f"neither number may exceed {keeps.max_blocks}: give some up"
    )


def _answer(
    cache: CacheManager, question: PrefixReleased | ShowAsked | UnpinAsked | ExplainAsked
) -> Report:
    match question:
        case PrefixReleased(prefix_id):
            return ReportReleased(prefix_id, cache.unregister(prefix_id))
        case ShowAsked():
            return ReportShown(_show(cache, question))
        case UnpinAsked(digest):
            return ReportUnpinned(desk.unpin(cache, digest))
        case ExplainAsked(tokens):
            if len(tokens) == 0:
                raise InvalidRequest("the prompt is empty")
            chain = cache.new_chain()
            chain.extend(tokens)
            return ReportExplained(cache.report(chain, len(tokens) - 1), len(tokens))


def _show(cache: CacheManager, question: ShowAsked) -> ShownEntry:
    if question.digest is not None:
        return desk.show(cache, question.digest)
    return desk.show_registered(cache, question.prefix_id or PrefixId(""))


def _evict(caches: Caches, question: EvictAsked) -> Evicted:
    num_evicted = num_in_use = num_kept = 0
    asked = _to_evict_from(caches, question)
    for cache, share in zip(asked, _shares(asked, question), strict=True):
        plan = _plan(cache, question, None if share is None else share - num_evicted)
        evicted = plan.result if question.is_dry_run else plan.carry_out(cache)
        num_evicted += evicted.num_evicted
        num_in_use += evicted.num_in_use
        num_kept += evicted.num_kept
    return Evicted(num_evicted, num_in_use, num_kept)


def _shares(asked: Sequence[CacheManager], question: EvictAsked) -> Iterable[int | None]:
    """How many blocks may have gone behind each cache; None for all that may go.

    What is old goes all the same, whosever it is; else what goes next goes first.
    """
    most, ages = question.max_blocks, (question.used_until_s, question.created_until_s)
    if most is None or question.digest is not None or ages != (None, None):
        return [most] * len(asked)
    return accumulate(desk.next_of_all(asked, most))


def _to_evict_from(caches: Caches, question: EvictAsked) -> list[CacheManager]:
    asked = _asked(caches, question.tenant)
    return asked if question.digest is None else [_holder(asked, question.digest)]


def _plan(cache: CacheManager, question: EvictAsked, max_blocks: int | None) -> desk.EvictionPlan:
    used_until_s, created_until_s = question.used_until_s, question.created_until_s
    if question.digest is not None:
        return desk.plan_entry(cache, question.digest)
    if used_until_s is not None:
        return desk.plan_old(cache, lambda node: node.last_used_s <= used_until_s, max_blocks)
    if created_until_s is not None:
        return desk.plan_old(cache, lambda node: node.created_s <= created_until_s, max_blocks)
    return desk.plan_blocks(cache, max_blocks)


def _asked(caches: Caches, tenant: TenantName | None) -> list[CacheManager]:
    """One tenant's cache, or all."""
    return list(caches.values()) if tenant is None else [_cache_of(caches, tenant)]


def _to_read(caches: Caches, question: VerifyAsked) -> ReportToRead:
    asked = _asked(caches, question.tenant)
    if question.digest is not None:
        asked = [_holder(asked, question.digest)]
    asked.sort(key=lambda cache: cache.pool.blocks.start)
    nodes = chain.from_iterable(
        verification.blocks_to_read(cache, question.digest, question.first_block) for cache in asked
    )
    found = tuple(islice(nodes, question.max_blocks))
    left_out = next(nodes, None)
    return ReportToRead(found, None if left_out is None else left_out.block)


def _owner(caches: Caches, block: BlockId) -> CacheManager:
    """Whose block it is."""
    return next(cache for cache in caches.values() if block in cache.pool.blocks)


def _holder(caches: list[CacheManager], digest: str) -> CacheManager:
    """The one of the caches that holds the entry.

    Raises:
        UnknownEntry, InvalidRequest: none does, or several do.
    """
    holders = []
    for cache in caches:
        try:
            desk.find(cache, digest)
        except UnknownEntry:
            continue
        holders.append(cache)
    if len(holders) > 1:
        raise InvalidRequest(f"{len(holders)} tenants have digests that begin with `{digest}`")
    if not holders:
        raise UnknownEntry(f"nothing cached has a digest that begins with `{digest}`")
    return holders[0]
