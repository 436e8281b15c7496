"""The listening socket; opened before anything slow, so that a port in use ends the start."""

import errno
import ipaddress
import os
import socket
import stat
from pathlib import Path

from octavo.config.env import take_inherited_sockets
from octavo.config.server import ServerConfig
from octavo.engine.core.errors import ConfigurationError

_BACKLOG = 2048


_FIRST_INHERITED = 3


def open_listener(config: ServerConfig) -> socket.socket:
    """Return a bound and listening socket. Raises ConfigurationError.

    One that a supervisor hands down (systemd's socket units do) takes the place of host and port.
    It stays open while the server is started anew, so clients wait instead of being refused.
    """
    inherited = take_inherited_sockets()
    if inherited > 1:
        raise ConfigurationError(f"{inherited} sockets were handed down; one can be served")
    if inherited and config.uds is not None:
        raise ConfigurationError("--uds: a socket was handed down already; leave the setting out")
    if inherited:
        return _take_inherited()
    if config.uds is not None:
        return _open_unix(Path(config.uds))
    try:
        infos = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as error:
        raise ConfigurationError(
            f"--host: cannot resolve {config.host!r} ({error.strerror}); "
            "give an address of this machine, such as 127.0.0.1 or 0.0.0.0"
        ) from error
    family, _, _, _, address = infos[0]
    try:
        return socket.create_server(
            (address[0], config.port), family=socket.AddressFamily(family), backlog=_BACKLOG
        )
    except OSError as error:
        raise ConfigurationError(_explain(config, error)) from error


def _take_inherited() -> socket.socket:
    try:
        inherited = socket.socket(fileno=_FIRST_INHERITED)
        if inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return inherited
        inherited.close()
        reason = "it does not listen"
    except OSError as error:
        reason = os.strerror(error.errno or 0)
    raise ConfigurationError(
        f"The descriptor {_FIRST_INHERITED} that was handed down is no listening socket: {reason}"
    )


def _explain(config: ServerConfig, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"Port {config.port} on {config.host} is in use; "
            "stop what listens there or give another --port"
        )
    if error.errno == errno.EACCES:
        return f"Port {config.port} needs more rights; give a --port from 1024 on"
    return f"Cannot listen on {config.host} port {config.port}: {error.strerror}"


def _open_unix(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _answers(path):
            path.unlink()
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = (
            "it is in use" if error.errno == errno.EADDRINUSE else os.strerror(error.errno or 0)
        )
        raise ConfigurationError(f"--uds: cannot listen on {path}: {reason}") from error
    return listener


def _answers(path: Path) -> bool:
    """Tell a server's socket from one that a dead server left behind."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0


def describe(config: ServerConfig, listener: socket.socket) -> str:
    """Return the address as a URL, or the path of the Unix socket."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def local_url(config: ServerConfig, listener: socket.socket) -> str:
    """Return a URL that works on this machine, also for a socket on all of its addresses."""
    url = describe(config, listener)
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def is_open_to_others(listener: socket.socket) -> bool:
    """Return whether other machines can reach the socket."""
    if listener.family == socket.AF_UNIX:
        return False
    return not ipaddress.ip_address(listener.getsockname()[0]).is_loopback
