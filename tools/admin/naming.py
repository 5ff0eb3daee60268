"""What operators call a cached prefix: its digest, its id if it is registered, or a beginning."""

from __future__ import annotations

from collections.abc import Iterator

from ipc.errors import ServerError
from ipc.fields import MAX_LIST_LIMIT
from ipc.messages import Shown
from ipc.sync_client import Client

#: What the ids of registered prefixes begin with; digests have hexadecimal digits only.
_PREFIX_ID_MARK = "p-"
_WHOLE_PREFIX_ID = 34


def whole_prefix_id(client: Client, name: str, tenant: str) -> str:
    """The id of the registered prefix that begins so; the name itself if it is whole.

    Raises:
        ValueError: several do, or the beginning is too short, or this socket tells of none.
    """
    if len(name) >= _WHOLE_PREFIX_ID or not name.startswith(_PREFIX_ID_MARK):
        return name
    if len(name) < len(_PREFIX_ID_MARK) + 8:
        raise ValueError(f"{name}: give 8 digits of the prefix id, or more")
    try:
        ids = list(_registered(client, tenant))
    except ServerError as error:
        if error.code != "forbidden":
            raise
        raise ValueError(
            f"{name}: the beginning of an id is enough on the admin socket only; give the whole id"
        ) from error
    found = [prefix_id for prefix_id in ids if prefix_id.startswith(name)]
    if len(found) > 1:
        raise ValueError(f"{len(found)} registered prefixes begin with {name}: give more of it")
    return found[0] if found else name


def _registered(client: Client, tenant: str) -> Iterator[str]:
    offset = 0
    while True:
        reply = client.list(MAX_LIST_LIMIT, offset=offset, tenant=tenant, kept="registered")
        yield from (entry.prefix_id for entry in reply.entries if entry.prefix_id is not None)
        offset += len(reply.entries)
        if not reply.entries or offset >= reply.total:
            return


def digest_of(client: Client, name: str, tenant: str) -> str:
    """The digest, or its beginning, that a prefix goes by.

    Raises:
        ValueError: as `whole_prefix_id`.
    """
    if not name.startswith(_PREFIX_ID_MARK):
        return name
    return show(client, name, tenant).entry.digest


def show(client: Client, name: str, tenant: str, *, with_text: bool = False) -> Shown:
    """The prefix of this name.

    Raises:
        ValueError: as `whole_prefix_id`.
    """
    if not name.startswith(_PREFIX_ID_MARK):
        return client.show(name, tenant=tenant, with_text=with_text)
    prefix_id = whole_prefix_id(client, name, tenant)
    return client.show(prefix_id=prefix_id, tenant=tenant, with_text=with_text)
