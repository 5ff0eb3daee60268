"""`rtcached`: reads the command line and the configuration, serves, ends with a code that says why.

Exit codes: 0 ended cleanly, 1 the device failed at the start, 2 wrong configuration, bundle or
endpoint, 3 the engine broke in service (a bug), 4 the device was lost in service or was not given
back, 5 the device hung in service, 6 the device has too little memory for the bundle, 130 or 143
ended at once by a second SIGINT or SIGTERM. After 1, 3, 4 and 5 a service manager should start it
again. What is between start and end is in `serving`.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
from collections.abc import Sequence
from contextlib import closing

import structlog
import uvloop

from ipc import standard_streams
from ipc.errors import EndpointError
from ipc.version import add_version
from runtime_cache import log, open_files, options
from runtime_cache.errors import (
    ConfigError,
    DeviceError,
    DeviceHung,
    OutOfDeviceMemory,
    RuntimeCacheError,
    StepTimeout,
)
from runtime_cache.notify import Notifier
from runtime_cache.options import Loaded
from runtime_cache.reload import Settings
from runtime_cache.serving import Ending, serve

logger = structlog.get_logger(__name__)

EXIT_OK = 0
EXIT_DEVICE = 1
EXIT_CONFIG = 2
EXIT_BROKEN = 3
EXIT_LOST = 4
EXIT_HUNG = 5
EXIT_MEMORY = 6


_EPILOG = """\
example, on the software device:
  rtcached --model-bundle ./smollm2 --device sim:0 \\
      --ipc-endpoint ipc://./rtcached.sock

SIGTERM and SIGINT drain; a second one ends the process at once.

exit codes:
  0 ended cleanly            1 the device failed at the start
  2 wrong configuration, bundle or endpoint
  3 a bug of rtcached; its log has the details: start it again
  4 the device was lost in service: start it again; if that repeats, the device
    needs a reset, or repair
  5 the device hung in service (device.hang_limit_ms): start it again
  6 the device has too little memory for the bundle
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the daemon until SIGTERM or SIGINT; returns the exit code."""
    standard_streams.ensure()
    args = new_parser().parse_args(argv)
    flags = {name: text for name, text in vars(args).items() if "." in name}
    try:
        settings = Settings(lambda: options.load(args.config, flags=flags))
        if args.check_config:
            settings.open_keys()
            _print_config(settings.loaded)
            return EXIT_OK
        log.configure(settings.config.log)
        log.forward_libraries()
        return _run(settings)
    except (ConfigError, EndpointError) as error:
        log.complain(f"rtcached: {error}")
        return EXIT_CONFIG
    except DeviceError as error:
        log.complain(f"rtcached: {error}")
        return _leave(_code_of_start(error))


def _run(settings: Settings) -> int:
    """Serve; whoever manages services is told how it goes."""
    open_files.allow_many()
    # The stacks of all threads, if the watchdog (SIGABRT) or a library ends the process.
    faulthandler.enable(sys.__stderr__ or 2)
    with closing(Notifier.from_env(os.environ)) as notifier:
        try:
            return _end(uvloop.run(serve(settings, notifier)))
        except (ConfigError, EndpointError, DeviceError) as error:
            notifier.status(f"The start failed: {error}")
            raise


def _end(ending: Ending) -> int:
    """The exit code of a service that was ready."""
    code = EXIT_OK if ending.fatal is None else _code_of(ending.fatal)
    if not ending.is_given_back:
        code = code or EXIT_LOST
    logger.info("stopped", exit_code=code)
    return _leave(code)


def _leave(code: int) -> int:
    """The exit code; behind a hung device the process ends here.

    What the driver's libraries do at the end of a process may wait for the device.
    """
    if code == EXIT_HUNG:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _code_of_start(error: DeviceError) -> int:
    """The exit code for what a start has failed with."""
    if isinstance(error, OutOfDeviceMemory):
        return EXIT_MEMORY
    return EXIT_HUNG if isinstance(error, DeviceHung | StepTimeout) else EXIT_DEVICE


def _code_of(fatal: RuntimeCacheError) -> int:
    """The exit code for what has ended the service."""
    if isinstance(fatal, DeviceHung):
        return EXIT_HUNG
    return EXIT_LOST if isinstance(fatal, DeviceError) else EXIT_BROKEN


def new_parser() -> argparse.ArgumentParser:
    """The command line of rtcached."""
    parser = argparse.ArgumentParser(
        prog="rtcached",
        description="Prefix-cache and inference daemon for Huawei Ascend NPUs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_version(parser)
    parser.add_argument("--config", metavar="FILE", help="TOML file; see rtcached.toml")
    parser.add_argument(
        "--check-config",
        action="store_true",
        help="print the effective values and where each came from, then exit",
    )
    parser.add_argument(
        "--insecure-tcp",
        action="store_const",
        const="true",
        default=argparse.SUPPRESS,
        dest="ipc.insecure_tcp",
        help="the same as --ipc-insecure-tcp true",
    )
    options.add_flags(parser)
    return parser


def _print_config(loaded: Loaded) -> None:
    rows = [(path, options.toml(value), origin) for path, value, origin in options.describe(loaded)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    try:
        for path, value, origin in rows:
            print(f"{path:<{widths[0]}}  {value:<{widths[1]}}  {origin}")
        sys.stdout.flush()
    except BrokenPipeError:  # `rtcached --check-config | head`
        # Python would complain once more when it flushes at exit: there must be something to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
