"""Who may connect to the daemon, and whether its secrets are its own."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from ipc.curve_keys import fault_of_library, read_key_pair
from ipc.endpoint import IpcAddress, TcpAddress, parse_endpoint
from ipc.errors import EndpointError, KeyFileError
from runtime_cache.config import Config, admin_endpoint, endpoints_of
from runtime_cache.errors import ConfigError
from runtime_cache.keys import read_keys
from runtime_cache.salts import SaltFault, read_salt, salt_path, state_directory
from tools.doctor.findings import Finding, ok, problem, sentence, warning
from tools.doctor.host import Host

_DOCS = "docs/security.md tells how to set it up."


def check_security(host: Host, config: Config) -> list[Finding]:
    """Everything of it, in the order of the configuration."""
    findings = [*_check_tcp(config), *_check_modes(host, config)]
    if config.ipc.server_key_file:
        findings += [_check_server_key(host, config), _check_keys(host, config)]
    return findings + list(_check_salts(host, config))


def _check_tcp(config: Config) -> Iterator[Finding]:
    """A TCP port is either protected, or known to be not."""
    for endpoint in endpoints_of(config):
        if not isinstance(_address(endpoint), TcpAddress):
            continue
        if fault := fault_of_library():
            yield problem("tcp", sentence(fault), "Install a newer pyzmq.")
        if config.ipc.server_key_file:
            yield ok("tcp", f"{endpoint} uses CURVE: only listed keys may connect.")
        elif config.ipc.insecure_tcp:
            yield warning(
                "tcp",
                f"{endpoint} is open without CURVE (ipc.insecure_tcp): whoever reaches it may use "
                f"the daemon and read along.",
                f"Give ipc.server_key_file and ipc.keys_file; {_DOCS}",
            )
        else:
            yield problem(
                "tcp",
                f"{endpoint}: TCP needs CURVE, so the daemon does not start.",
                f"Give ipc.server_key_file and ipc.keys_file; {_DOCS}",
            )


def _check_modes(host: Host, config: Config) -> Iterator[Finding]:
    """Whether everybody on this host may use the daemon, or be its administrator."""
    if int(config.ipc.socket_mode, 8) & stat.S_IWOTH:
        yield warning(
            "modes",
            f"ipc.socket_mode is {config.ipc.socket_mode}: everybody on this host may use the "
            f"daemon.",
            "Take 0660, and put those who may into the socket's group.",
        )
    admin = _address(admin_endpoint(config.ipc))
    mode = _mode(host, admin.path) if isinstance(admin, IpcAddress) else 0
    if isinstance(admin, IpcAddress) and stat.S_ISSOCK(mode) and mode & 0o077:
        yield problem(
            "modes",
            f"The administrators' socket {admin.path} has mode {stat.S_IMODE(mode):04o}; the "
            f"daemon makes it 0600, so somebody has changed it.",
            f"chmod 0600 {admin.path}",
        )
    for directory in sorted({_directory(endpoint) for endpoint in endpoints_of(config)} - {""}):
        mode = _mode(host, directory)
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            yield problem(
                "modes",
                f"Everybody may write the socket's directory {directory}: anybody can put a socket "
                f"of his own in the daemon's place.",
                f"chmod 0750 {directory}",
            )


def _check_server_key(host: Host, config: Config) -> Finding:
    try:
        pair = read_key_pair(host.at(config.ipc.server_key_file))
    except KeyFileError as error:
        return problem(
            "keys",
            sentence(str(error)),
            "rtcache-admin keygen makes a pair; its secret file has mode 0600 and belongs to the "
            "daemon's user.",
        )
    return ok("keys", f"The daemon's public key is {pair.public}")


def _check_keys(host: Host, config: Config) -> Finding:
    path = config.ipc.keys_file
    try:
        keys = read_keys(str(host.at(path)), {tenant.name for tenant in config.tenants})
    except ConfigError as error:
        text = " ".join(line.strip() for line in error.message.splitlines())
        return problem("keys", sentence(text), f"Correct {path}; docs/security.md has its form.")
    if not keys:
        return warning("keys", f"{path} lists no key: nobody can connect over TCP.")
    admins = sum(key.role == "admin" for key in keys)
    return ok(
        "keys", f"{path} lists {len(keys)} key{'s' * (len(keys) != 1)}, {admins} of administrators."
    )


def _check_salts(host: Host, config: Config) -> Iterator[Finding]:
    """Whether the tenants' salts outlive a restart."""
    if not config.tenants:
        return
    directory = state_directory(config.daemon.state_dir, host.env)
    if not directory:
        yield warning(
            "salts",
            "There is no state directory: each start draws new salts, so that the names of what is "
            "cached change.",
            "Set daemon.state_dir (in a systemd unit: StateDirectory=).",
        )
        return
    fault = _fault_of_directory(host, directory)
    if fault:
        yield warning("salts", fault, "Give it to the daemon's user, with mode 0700.")
        return
    for tenant in config.tenants:
        try:
            read_salt(host.at(salt_path(directory, tenant.name)))
        except SaltFault as error:
            yield warning("salts", sentence(f"tenant {tenant.name!r}: {error}"))
    yield ok("salts", f"Salts are kept in {directory}.")


def _fault_of_directory(host: Host, directory: str) -> str:
    """Why salts cannot be kept there, as a sentence; empty if they can."""
    if host.is_dir(directory):
        is_writable = host.may(directory, os.W_OK | os.X_OK)
        return "" if is_writable else f"This user may not write the state directory {directory}."
    parent = os.path.dirname(directory.rstrip("/")) or "."
    if host.is_dir(parent) and host.may(parent, os.W_OK | os.X_OK):
        return ""
    return f"The state directory {directory} does not exist, and this user cannot make it."


def _address(endpoint: str) -> IpcAddress | TcpAddress | None:
    try:
        return parse_endpoint(endpoint)
    except EndpointError:
        return None  # said elsewhere


def _directory(endpoint: str) -> str:
    address = _address(endpoint)
    return (os.path.dirname(address.path) or ".") if isinstance(address, IpcAddress) else ""


def _mode(host: Host, path: str) -> int:
    """Of a file; 0 if there is none, or none to be seen."""
    try:
        return os.stat(host.at(path)).st_mode
    except OSError:
        return 0
