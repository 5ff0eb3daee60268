"""`python -m runtime_cache.aclsim atc ...`: the software device's model compiler."""

from __future__ import annotations

import sys

from runtime_cache.aclsim import atc


def main(arguments: list[str]) -> int:
    """Runs the tool named first; 2 for an unknown one."""
    if arguments[:1] != ["atc"]:
        print("usage: python -m runtime_cache.aclsim atc --framework=5 --model=... --output=...")
        return 2
    return atc.main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
