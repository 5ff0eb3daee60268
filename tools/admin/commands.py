"""The admin tool's commands, in the order in which `--help` lists them."""

from __future__ import annotations

from tools.admin.command import Command, LocalCommand
from tools.admin.completion import Completion
from tools.admin.daemon import Config, Drain, Reload, Resume, Stats
from tools.admin.evicting import Evict
from tools.admin.keeping import Lease, Pin, Unpin
from tools.admin.keygen import Keygen
from tools.admin.listing import List, Show
from tools.admin.prompts import Explain, Warm
from tools.admin.registering import Register, Release
from tools.admin.top import Top
from tools.admin.verify import Verify

COMMANDS: tuple[Command | LocalCommand, ...] = (
    List(),
    Show(),
    Explain(),
    Evict(),
    Pin(),
    Lease(),
    Unpin(),
    Register(),
    Release(),
    Warm(),
    Verify(),
    Stats(),
    Top(),
    Drain(),
    Resume(),
    Reload(),
    Config(),
    Keygen(),
    Completion(),
)
