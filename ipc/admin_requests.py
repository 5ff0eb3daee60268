"""What only administrators can ask, as types; read as strictly as `requests`. Pure data."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from ipc.checks import check_finite, check_one_of
from ipc.fields import (
    MAX_LIST_LIMIT,
    MAX_PERIOD_S,
    MAX_SAFE_INTEGER,
    MAX_TOKEN_ID,
    Count,
    DigestRef,
    KeptFilter,
    PeriodS,
    PrefixRef,
    SortKey,
    TenantRef,
    TokenIds,
)
from ipc.requests import ChatMessages, Request


class ListEntries(Request, frozen=True, kw_only=True, tag="list"):
    """Admin: what the cache holds; answered by `listed`.

    Attributes:
        limit: entries at the most [1 to 1000].
        offset: entries to skip [0 to 2³¹−1].
        tenant: only those of this tenant [at most 64 visible ASCII characters]; empty is the
            default tenant, absent: of all.
        sort: what comes first: `used` the most recently used, `age` the oldest, `size` the most
            bytes, `hits` the most often reused, `tokens` the longest.
        reverse: the other way round.
        min_age_s: only what was committed so long ago [0 to 31536000 seconds]; absent: all.
        min_idle_s: only what was not used for so long [0 to 31536000 seconds]; absent: all.
        min_bytes: only what occupies so much [0 to 2⁵³−1 bytes]; absent: all.
        min_hits: only what was reused so often [0 to 2⁵³−1]; absent: all.
        max_hits: only what was reused no more often [0 to 2⁵³−1]; absent: all.
        kept: only what is kept for this reason, for `any`, or for `none`; absent: all.
    """

    limit: Annotated[int, Meta(ge=1, le=MAX_LIST_LIMIT)] = 100
    offset: Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)] = 0
    tenant: TenantRef | None = None
    sort: SortKey = "used"
    reverse: bool = False
    min_age_s: PeriodS | None = None
    min_idle_s: PeriodS | None = None
    min_bytes: Count | None = None
    min_hits: Count | None = None
    max_hits: Count | None = None
    kept: KeptFilter | None = None

    def __post_init__(self) -> None:
        """Check what one field alone cannot show."""
        check_finite("min_age_s", self.min_age_s)
        check_finite("min_idle_s", self.min_idle_s)


class Show(Request, frozen=True, kw_only=True, tag="show"):
    """Admin: one cached prefix, block by block; answered by `shown`.

    Attributes:
        digest: of the prefix, or the beginning of it that no other has [8 to 64 lower-case
            hexadecimal digits]; `list` tells it.
        prefix_id: the name of a registered prefix. Exactly one of the two is given.
        tenant: whose prefix [at most 64 visible ASCII characters]; empty is the default tenant.
        with_text: tell its text too.
    """

    one_of: ClassVar[tuple[str, ...]] = ("digest", "prefix_id")
    digest: DigestRef | None = None
    prefix_id: PrefixRef | None = None
    tenant: TenantRef = ""
    with_text: bool = False

    def __post_init__(self) -> None:
        """Check what one field alone cannot show."""
        check_one_of(self, *self.one_of)


class Evict(Request, frozen=True, kw_only=True, tag="evict"):
    """Admin: drop cached blocks; answered by `evicted`.

    What a live request holds, or what is kept (registered, pinned, leased), stays. What is next to
    be evicted first is so of all tenants together, unless one is named.

    Attributes:
        max_blocks: so many blocks at the most, next to be evicted first [1 to 2³¹−1].
        max_bytes: so many bytes of blocks at the most, next to be evicted first [1 to 2⁵³−1
            bytes]; only whole blocks go.
        min_bytes: so many bytes of blocks at the least, next to be evicted first [1 to 2⁵³−1
            bytes]: whole blocks go, so it is less than a block more, or all that may go.
        all: every block.
        digest: the prefix with this digest, or the only one whose digest begins so [8 to 64
            lower-case hexadecimal digits], and all that goes on from it; blocks that other
            prefixes share stay.
        idle_s: every prefix that was not used for this long [0 to 31536000 seconds].
        age_s: every prefix that was committed so long ago [0 to 31536000 seconds]. Exactly one of
            the seven is given.
        tenant: only of this tenant [at most 64 visible ASCII characters]; empty is the default
            tenant, absent: of all.
        dry_run: tell what would go, and leave all as it is.
    """

    one_of: ClassVar[tuple[str, ...]] = (
        "max_blocks",
        "max_bytes",
        "min_bytes",
        "all",
        "digest",
        "idle_s",
        "age_s",
    )

    max_blocks: Annotated[int, Meta(ge=1, le=MAX_TOKEN_ID)] | None = None
    max_bytes: Annotated[int, Meta(ge=1, le=MAX_SAFE_INTEGER)] | None = None
    min_bytes: Annotated[int, Meta(ge=1, le=MAX_SAFE_INTEGER)] | None = None
    all: bool = False
    digest: DigestRef | None = None
    idle_s: PeriodS | None = None
    age_s: PeriodS | None = None
    tenant: TenantRef | None = None
    dry_run: bool = False

    def __post_init__(self) -> None:
        """Check what one field alone cannot show."""
        check_one_of(self, *self.one_of)
        check_finite("idle_s", self.idle_s)
        check_finite("age_s", self.age_s)


class Pin(Request, frozen=True, kw_only=True, tag="pin"):
    """Admin: keep a cached prefix, until `unpin` or for a time; answered by `pinned`.

    Attributes:
        digest: of the prefix, or the beginning of it that no other has [8 to 64 lower-case
            hexadecimal digits]; `list` tells it.
        ttl_s: for how long, a lease [above 0, to 31536000 seconds]; absent: until `unpin`, a pin. A
            pin over a lease makes it a pin; a lease over a pin leaves the pin, and `pinned` has no
            `expires_in_s`.
        tenant: whose prefix [at most 64 visible ASCII characters]; empty is the default tenant.
    """

    digest: DigestRef
    ttl_s: Annotated[float, Meta(gt=0, le=MAX_PERIOD_S)] | None = None
    tenant: TenantRef = ""

    def __post_init__(self) -> None:
        """Check what one field alone cannot show."""
        check_finite("ttl_s", self.ttl_s)


class Unpin(Request, frozen=True, kw_only=True, tag="unpin"):
    """Admin: give up a pin or a lease; answered by `unpinned`.

    Attributes:
        digest: as `pin.digest`.
        tenant: as `pin.tenant`.
    """

    digest: DigestRef
    tenant: TenantRef = ""


class Explain(Request, frozen=True, kw_only=True, tag="explain"):
    """Admin: what the cache would do for a prompt, without running it; answered by `explained`.

    Attributes:
        prompt: as `generate.prompt`.
        prompt_ids: as `generate.prompt_ids`.
        messages: as `chat.messages`. Exactly one of the three is given.
        prefix_id: as `generate.prefix_id`; not with `messages`.
        tenant: in whose cache [at most 64 visible ASCII characters]; empty is the default tenant.
    """

    one_of: ClassVar[tuple[str, ...]] = ("prompt", "prompt_ids", "messages")
    prompt: str | None = None
    prompt_ids: TokenIds | None = None
    messages: ChatMessages | None = None
    prefix_id: PrefixRef | None = None
    tenant: TenantRef = ""

    def __post_init__(self) -> None:
        """Check what one field alone cannot show."""
        check_one_of(self, *self.one_of)
        if self.messages is not None and self.prefix_id is not None:
            raise ValueError("`prefix_id` cannot be given together with `messages`")


class Verify(Request, frozen=True, kw_only=True, tag="verify"):
    """Admin: read cached KV from the device once more and compare; answered by `verified`.

    A block whose KV has changed leaves the cache, with all that was computed from it. One request
    reads a part, for about a second; `verified.next_block` says where the next one is to go on.

    Attributes:
        digest: only the blocks of this prefix, or of the only one whose digest begins so [8 to 64
            lower-case hexadecimal digits]; absent: all.
        first_block: leave out the blocks of the pool before this number [0 to 2³¹−1].
        tenant: only of this tenant [at most 64 visible ASCII characters]; empty is the default
            tenant, absent: of all.
    """

    digest: DigestRef | None = None
    first_block: Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)] = 0
    tenant: TenantRef | None = None


class GetStats(Request, frozen=True, tag="stats"):
    """Admin: counters and gauges; answered by `stats`."""


class Drain(Request, frozen=True, tag="drain"):
    """Admin: take no new work while the daemon stays up; answered by `draining`.

    What is unfinished goes on. New device work is refused (`draining`) until `resume`.
    """


class Resume(Request, frozen=True, tag="resume"):
    """Admin: take new work again; answered by `resumed`, also if none was refused."""


class Reload(Request, frozen=True, tag="reload"):
    """Admin: read configuration and keys again, as on SIGHUP; answered by `reloaded`.

    If anything is wrong with them, the former ones stay in force, which the message says
    (`invalid_config`).
    """


class GetConfig(Request, frozen=True, tag="config"):
    """Admin: the options in force; answered by `configured`."""
