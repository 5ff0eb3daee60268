"""What administrators are answered, as types; read as leniently as `replies`. Pure data."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from ipc.fields import PrefixName
from ipc.replies import CacheReport, Reply


class Entry(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prefix in the cache: a chain of blocks from the first token on.

    Attributes:
        digest: its name [hexadecimal]; `pin`, `unpin` and `evict` take it, or its beginning. Empty
            for a registration of which nothing is kept.
        num_tokens: its length [tokens].
        num_blocks: blocks it occupies, shared ones included.
        num_bytes: device memory of those blocks [bytes].
        hits: how often a request reused it or a beginning of it.
        age_s: since it was first committed [seconds].
        idle_s: since it was last used [seconds].
        in_use: a live request holds it; `kept` tells of other holds.
        prefix_id: its name if it is registered.
        tenant: whose it is; empty is the default tenant.
        kept: why it is not evicted: `registered`, `pinned` or `leased`; empty: it may be. What is
            kept for several reasons is listed once for each.
        expires_in_s: when the lease ends [seconds], if it is `leased`.
        priority: when room is needed, what has less goes first [0 to 100].
    """

    digest: str
    num_tokens: int
    num_blocks: int
    num_bytes: int
    hits: int
    age_s: float
    idle_s: float
    in_use: bool
    prefix_id: PrefixName | None = None
    tenant: str = ""
    kept: str = ""
    expires_in_s: float | None = None
    priority: int = 50


class Listed(Reply, frozen=True, kw_only=True, tag="listed"):
    """Answer to `list`.

    Attributes:
        entries: in the order asked for, at most `limit`, after the first `offset`.
        total: how many there are in all that were asked for.
    """

    entries: tuple[Entry, ...]
    total: int


class BlockEntry(Struct, frozen=True, kw_only=True):
    """One block of a cached prefix.

    Attributes:
        digest: of the prefix that ends with this block [hexadecimal].
        num_tokens: tokens in this block.
        hits: how often a request reused it.
        idle_s: since it was last used [seconds].
        num_requests: live requests that hold it.
        is_kept: a registration, pin or lease holds it.
    """

    digest: str
    num_tokens: int
    hits: int
    idle_s: float
    num_requests: int
    is_kept: bool


class Shown(Reply, frozen=True, kw_only=True, tag="shown"):
    """Answer to `show`.

    Attributes:
        entry: the prefix as `list` tells it.
        blocks: its blocks, the first tokens' block first.
        num_requests: live requests that hold it.
        num_continued_by: cached blocks that go on directly from its end.
        text: what the tokens say; absent unless asked for by `with_text`.
    """

    entry: Entry
    blocks: tuple[BlockEntry, ...]
    num_requests: int
    num_continued_by: int
    text: str | None = None


class Evicted(Reply, frozen=True, kw_only=True, tag="evicted"):
    """Answer to `evict`.

    Attributes:
        num_blocks: blocks dropped, or that would be.
        num_bytes: pool memory that became free, or would [bytes].
        in_use_blocks: blocks that stay because a live request holds them.
        kept_blocks: blocks that stay only because they are registered, pinned or leased.
        dry_run: nothing was dropped.
    """

    num_blocks: int
    num_bytes: int
    in_use_blocks: int
    kept_blocks: int = 0
    dry_run: bool = False


class Pinned(Reply, frozen=True, kw_only=True, tag="pinned"):
    """A prefix is kept.

    Attributes:
        digest: its name, in full [hexadecimal].
        num_tokens: its length [tokens].
        num_blocks: blocks that are kept.
        num_bytes: device memory of those blocks [bytes].
        expires_in_s: when the lease ends [seconds]; absent: it is kept until `unpin`.
    """

    digest: str
    num_tokens: int
    num_blocks: int
    num_bytes: int
    expires_in_s: float | None = None


class Unpinned(Reply, frozen=True, kw_only=True, tag="unpinned"):
    """A pin or a lease is given up; the prefix may be evicted from now on.

    Attributes:
        digest: its name, in full [hexadecimal].
    """

    digest: str


class Explained(Reply, frozen=True, kw_only=True, tag="explained"):
    """Answer to `explain`: what would be true if the prompt came now.

    Attributes:
        prompt_tokens: tokens of the prompt, a registered prefix before it included.
        cached_tokens: those of them whose KV would come from the cache.
        cache: why so many, and not more.
    """

    prompt_tokens: int
    cached_tokens: int
    cache: CacheReport


class Verified(Reply, frozen=True, kw_only=True, tag="verified"):
    """Answer to `verify`: what was read, and what was found.

    Attributes:
        num_blocks: blocks read; those that left the cache meanwhile do not count.
        num_bytes: KV read [bytes].
        num_new: those of the blocks that were read for the first time: nothing to compare with.
        num_changed: those that do not hold what they held the first time.
        num_not_finite: those that hold something that is no finite number.
        dropped_blocks: blocks that left the cache: those of the last two kinds, and what was, or
            may have been, computed or copied from them.
        in_use_blocks: those of the dropped ones that live requests hold, or that are kept.
        next_block: `first_block` of the request that goes on; absent: nothing is left to read.
    """

    num_blocks: int
    num_bytes: int
    num_new: int
    num_changed: int
    num_not_finite: int
    dropped_blocks: int
    in_use_blocks: int
    next_block: int | None = None


class Stats(Reply, frozen=True, kw_only=True, tag="stats"):
    """Answer to `stats`.

    Attributes:
        stats: section → name → value; names may be added at any time.
    """

    stats: dict[str, Any]


class Draining(Reply, frozen=True, kw_only=True, tag="draining"):
    """Answer to `drain`: no new work is taken.

    Attributes:
        num_unfinished: requests that go on.
    """

    num_unfinished: int


class Resumed(Reply, frozen=True, tag="resumed"):
    """Answer to `resume`: new work is taken."""


class Reloaded(Reply, frozen=True, kw_only=True, tag="reloaded"):
    """Answer to `reload`.

    Attributes:
        changed: paths of the options that have a new value now, such as `log.level`.
        needs_restart: paths of those whose new value counts from the next start on.
        num_keys: keys that may connect; absent if there is no file of keys.
    """

    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]
    num_keys: int | None = None


class ConfigOption(Struct, frozen=True, kw_only=True):
    """One option and its value.

    Attributes:
        path: its name, such as `log.level`.
        value: in force, as it would be written in the file; secrets are hidden.
        origin: where the value came from: `default`, a file, `environment` or `flag` with a name.
        is_reloadable: `reload` can change it.
    """

    path: str
    value: str
    origin: str
    is_reloadable: bool


class Configured(Reply, frozen=True, kw_only=True, tag="configured"):
    """Answer to `config`.

    Attributes:
        options: all of them, in the order of the reference file.
    """

    options: tuple[ConfigOption, ...]
