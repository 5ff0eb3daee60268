"""The version of this project, and the option by which each of its commands tells it."""

from __future__ import annotations

import argparse

__version__ = "0.1.0"


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add `--version`, which prints the command's name and version and ends it."""
    parser.add_argument(
        "--version",
        action="version",
        version=f"{parser.prog} {__version__}",
        help="print the version and end",
    )
