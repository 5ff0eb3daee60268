"""`python -m runtime_cache.aclsim run|atc ...`: programs on the software device; its compiler."""

from __future__ import annotations

import signal
import sys

USAGE = """\
usage: python -m runtime_cache.aclsim run [OPTIONS] PROGRAM [ARGS]
       python -m runtime_cache.aclsim atc --framework=5 --model=NET.onnx --output=NET ...

  run   runs a program that imports acl on the Ascend device in software (run --help)
  atc   compiles an ONNX model for it, with the flags of Ascend's compiler (atc --help)"""


def main(arguments: list[str]) -> int:
    """Runs the tool named first; 2 for an unknown one."""
    tool, rest = arguments[:1], arguments[1:]
    if tool == ["run"]:
        from runtime_cache.aclsim import run

        return run.main(rest)
    if tool == ["atc"]:
        from runtime_cache.aclsim.atc import compiler

        signal.signal(signal.SIGTERM, signal.default_int_handler)  # half-written files go
        return compiler.main(rest)
    asks = tool in (["-h"], ["--help"])
    print(USAGE, file=sys.stdout if asks else sys.stderr)
    return 0 if asks else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
