"""What a made-up daemon answers administrators: the widest values that can come."""

from __future__ import annotations

from ipc.messages import (
    AnyReply,
    AnyRequest,
    BlockEntry,
    ConfigOption,
    Configured,
    Drain,
    Draining,
    Entry,
    GetConfig,
    MessageId,
    PrefixName,
    Reload,
    Reloaded,
    Resume,
    Resumed,
    Show,
    Shown,
)

ID = MessageId("2")
DIGEST = "5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8"
WHOLE_ID = f"p-{DIGEST[:32]}"
LONG_NAME = "a-tenant-whose-name-has-as-many-characters-as-can-be-" + "x" * 11


def entry(**fields: object) -> Entry:
    """An entry; what is not given is as wide as it can be."""
    values: dict[str, object] = {
        "digest": DIGEST,
        "num_tokens": 1048576,
        "num_blocks": 16384,
        "num_bytes": 999 * 1024**3,
        "hits": 2**53 - 1,
        "age_s": 86399999.0,
        "idle_s": 86399999.0,
        "in_use": True,
        "prefix_id": PrefixName(WHOLE_ID),
        "tenant": LONG_NAME,
        "kept": "leased",
        "expires_in_s": 31536000.0,
        "priority": 100,
    }
    return Entry(**values | fields)  # type: ignore[arg-type]


def block(**fields: object) -> BlockEntry:
    """A block of a prefix, the same way."""
    values: dict[str, object] = {
        "digest": DIGEST,
        "num_tokens": 4096,
        "hits": 2**53 - 1,
        "idle_s": 86399999.0,
        "num_requests": 1024,
        "is_kept": True,
    }
    return BlockEntry(**values | fields)  # type: ignore[arg-type]


OPTIONS = (
    ConfigOption(path="log.level", value='"info"', origin="default", is_reloadable=True),
    ConfigOption(
        path="engine.interleave_chunk_tokens",
        value="128",
        origin="environment RTCACHE_ENGINE_INTERLEAVE_CHUNK_TOKENS",
        is_reloadable=False,
    ),
    ConfigOption(
        path="tenants[0].endpoint",
        value=f'"ipc:///{"long/" * 20}s"',
        origin=f"/etc/{'very/' * 20}rtcached.toml",
        is_reloadable=False,
    ),
)


def of_the_daemon(message: AnyRequest) -> AnyReply | None:
    """The reply to a question about the daemon itself, or to `show`; None to others."""
    match message:
        case Show():
            blocks = (block(), block(num_requests=0, is_kept=False))
            text = "what it says" if message.with_text else None
            return Shown(
                message.id,
                entry=entry(),
                blocks=blocks,
                num_requests=1024,
                num_continued_by=10_000,
                text=text,
            )
        case Drain():
            return Draining(message.id, num_unfinished=3)
        case Resume():
            return Resumed(message.id)
        case Reload():
            return Reloaded(message.id, changed=("log.level",), needs_restart=(), num_keys=1)
        case GetConfig():
            return Configured(message.id, options=OPTIONS)
    return None
