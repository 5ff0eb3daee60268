"""What the fields of messages may hold: names, limits and patterns. Pure data."""

from __future__ import annotations

from typing import Annotated, Literal, NewType

from msgspec import Meta

#: The version of the protocol these messages belong to. It changes only when old clients would
#: break.
PROTOCOL_VERSION = 1

#: Names a request among those of one client; chosen by the client, echoed in every reply to it.
MessageId = NewType("MessageId", str)
#: Names a registered prefix; chosen by the daemon.
PrefixName = NewType("PrefixName", str)

# What a field may hold. Characters are Unicode code points. Texts have no limit of their own: the
# limit on the whole message (`codec.Limits.max_message_bytes`) is reached first.
MAX_ID_CHARS = 64
MAX_PREFIX_ID_CHARS = 128
MAX_TENANT_CHARS = 64
MAX_PROMPT_IDS = 1_048_576
MAX_TOKEN_ID = 2**31 - 1
MAX_CHAT_MESSAGES = 4096
MAX_TOKENS = 1_048_576
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
#: The largest integer that a JSON number carries exactly in every language (JavaScript's limit).
MAX_SAFE_INTEGER = 2**53 - 1
MAX_SEED = MAX_SAFE_INTEGER
MAX_DEADLINE_MS = 86_400_000
MAX_PRIORITY = 100
MAX_LIST_LIMIT = 1000
MAX_CREDIT = 1_000_000
MIN_LEASE_MS = 1000
MAX_LEASE_MS = 3_600_000
#: The beginning of a digest that is taken for a name: 32 bits, so that a typing error finds none.
MIN_DIGEST_CHARS = 8
MAX_DIGEST_CHARS = 64
#: A year [seconds].
MAX_PERIOD_S = 31_536_000

ID_PATTERN = r"\A[!-~]+\Z"
TENANT_PATTERN = r"\A[!-~]*\Z"
DIGEST_PATTERN = r"\A[0-9a-f]+\Z"
TOKEN_ID_KEY_PATTERN = r"\A(0|[1-9][0-9]{0,9})\Z"

Id = Annotated[
    MessageId,
    Meta(min_length=1, max_length=MAX_ID_CHARS, pattern=ID_PATTERN),
]
PrefixRef = Annotated[
    PrefixName,
    Meta(min_length=1, max_length=MAX_PREFIX_ID_CHARS, pattern=ID_PATTERN),
]
TenantRef = Annotated[str, Meta(max_length=MAX_TENANT_CHARS, pattern=TENANT_PATTERN)]
DigestRef = Annotated[
    str,
    Meta(min_length=MIN_DIGEST_CHARS, max_length=MAX_DIGEST_CHARS, pattern=DIGEST_PATTERN),
]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
TokenIds = Annotated[tuple[TokenId, ...], Meta(max_length=MAX_PROMPT_IDS)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
BiasKey = Annotated[str, Meta(pattern=TOKEN_ID_KEY_PATTERN)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Priority = Annotated[int, Meta(ge=0, le=MAX_PRIORITY)]
CreditAmount = Annotated[int, Meta(ge=1, le=MAX_CREDIT)]
LeaseMs = Annotated[int, Meta(ge=MIN_LEASE_MS, le=MAX_LEASE_MS)]
PeriodS = Annotated[float, Meta(ge=0, le=MAX_PERIOD_S)]
Count = Annotated[int, Meta(ge=0, le=MAX_SAFE_INTEGER)]

Role = Literal["system", "user", "assistant", "tool"]
#: Why an answer ends, as this daemon says it; a reply may hold a newer daemon's word.
FinishReason = Literal[
    "stop", "length", "cancelled", "deadline", "slow_reader", "lease_expired", "shutdown"
]
SortKey = Literal["used", "age", "size", "hits", "tokens"]
KeptFilter = Literal["none", "any", "registered", "pinned", "leased"]
