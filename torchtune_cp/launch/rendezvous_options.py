"""Checks and completes torchrun's rendezvous options before anything is started.

A single node needs no rendezvous: its store listens on the loopback interface. A fixed number of nodes uses
a store on node 0, without pickled state (`static`); `c10d` is used for a varying number of nodes, or on
request.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import uuid
from dataclasses import dataclass
from importlib.metadata import entry_points

from torchtune_cp.did_you_mean import did_you_mean
from torchtune_cp.errors import ConfigError
from torchtune_cp.launch.addresses import LOOPBACK, AddressError, is_loopback, is_own, shown

#: The backends of `launch.rendezvous`, as passed to torch's agent, and their own settings.
ONE_NODE, STATIC, DYNAMIC = "tune_one_node", "tune_static", "tune_c10d"
TIMEOUT, NODE_RANK = "tune_timeout", "tune_node_rank"

DEFAULT_TIMEOUT_S = 120
#: Torchrun's own defaults; they do not show whether the user has set them.
_MASTER_ADDR, _MASTER_PORT, _C10D_PORT = "127.0.0.1", 29500, 29400

_SECONDS = ("read_timeout", "join_timeout", "last_call_timeout", "close_timeout")
_C10D_NUMBERS = (*_SECONDS, "heartbeat_timeout", "keep_alive_interval", "keep_alive_max_attempt")
_YES, _NO = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")
#: `--rdzv-conf` of each backend.
_CONF = {"static": ("timeout",), "c10d": (*_C10D_NUMBERS, "store_type", "is_host")}
#: Torch's own backends that are left to it.
_ETCD = ("etcd", "etcd-v2")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add `--rdzv-timeout`, and keep apart what the user names from torchrun's defaults."""
    from torch.distributed.argparse_util import env

    parser.add_argument(
        "--rdzv-timeout",
        "--rdzv_timeout",
        action=env,
        type=int,
        help=f"Seconds within which all nodes must join (default {DEFAULT_TIMEOUT_S}).",
    )
    if parser.get_default("rdzv_backend") == "static":
        parser.set_defaults(rdzv_backend=None)


def settle_rendezvous(args: argparse.Namespace) -> None:
    """Choose the backend, and write into `args` the settings for torch's agent.

    Args:
        args: The options of `tune run`; `--nnodes` is well-formed.

    Raises:
        ConfigError: They contradict each other, or name a machine that cannot be meant.
    """
    from torch.distributed.run import parse_min_max_nnodes

    fewest, most = parse_min_max_nnodes(args.nnodes)
    if args.standalone:
        _check_standalone(args, most)
    backend = args.rdzv_backend or ("static" if fewest == most else "c10d")
    _check_backend(backend, args.rdzv_endpoint)
    timeout_key = "join_timeout" if backend == "c10d" else "timeout"
    conf = _read_conf(args.rdzv_conf, backend)
    if args.rdzv_timeout is not None and timeout_key in conf:
        raise ConfigError(
            f"--rdzv-timeout and {timeout_key} in --rdzv-conf are the same setting: set only one of them"
        )
    given = conf.get(timeout_key, args.rdzv_timeout)
    timeout = DEFAULT_TIMEOUT_S if given is None else _seconds("--rdzv-timeout", given)
    conf[timeout_key] = str(timeout)
    in_file = backend == "c10d" and conf.get("store_type", "tcp").lower() == "file"
    elsewhere = in_file or conf.get("is_host", "").lower() in _NO
    _note_unused(args, backend, most)
    args.standalone = False
    if backend not in _CONF:
        pass  # etcd, or an installed plug-in: its own options
    elif most == 1 and not elsewhere:
        _settle_one_node(args, backend)
        conf = {}
    elif backend == "static":
        _settle_static(args, fewest, most)
        conf = {TIMEOUT: str(timeout), NODE_RANK: str(args.node_rank)}
    else:
        _settle_c10d(args, fewest, most, in_file)
        conf |= {TIMEOUT: str(timeout)}
        conf.setdefault("read_timeout", str(min(timeout, 60)))
    args.rdzv_conf = ",".join(f"{key}={value}" for key, value in conf.items())


def _check_standalone(args: argparse.Namespace, most: int) -> None:
    if most > 1:
        raise ConfigError(f"--standalone is for one node, but --nnodes is {args.nnodes}")
    if args.rdzv_backend not in (None, "static", "c10d"):
        raise ConfigError(f"--standalone and --rdzv-backend {args.rdzv_backend}: choose one")
    if args.master_port or (args.rdzv_endpoint and not args.rdzv_endpoint.endswith(":0")):
        option = "--master-port" if args.master_port else "--rdzv-endpoint"
        raise ConfigError(f"--standalone chooses a free port: remove {option}, or --standalone")


def _check_backend(backend: str, endpoint: str) -> None:
    known = [*_CONF, *_ETCD]
    if backend not in known:  # what is installed is looked through only then
        known += sorted(entry_points(group="torchrun.handlers").names)
        if backend not in known:
            raise ConfigError(
                f"--rdzv-backend: got {backend!r}{did_you_mean(backend, known)}; allowed:"
                f" {', '.join(known)}"
            )
    if backend in _ETCD and importlib.util.find_spec("etcd") is None:
        raise ConfigError(
            f"--rdzv-backend {backend} needs the package python-etcd: pip install python-etcd (or"
            " choose static or c10d)"
        )
    if backend in _ETCD and not endpoint:
        raise ConfigError(f"--rdzv-backend {backend} needs --rdzv-endpoint HOST:PORT, its server")


def _read_conf(text: str, backend: str) -> dict[str, str]:
    conf: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if not key or not value:
            raise ConfigError(f"--rdzv-conf: expected key=value,key=value, got {part!r}")
        conf[key] = value
    allowed = _CONF.get(backend)
    for key, value in conf.items():
        if allowed is None:
            break
        if key not in allowed:
            raise ConfigError(
                f"--rdzv-conf: --rdzv-backend {backend} has no {key}; it takes {', '.join(allowed)}"
            )
        if key in (*_C10D_NUMBERS, "timeout"):
            _seconds(f"--rdzv-conf {key}", value)
    for key, values in (("store_type", ("tcp", "file")), ("is_host", (*_YES, *_NO))):
        if allowed and conf.get(key, values[0]).lower() not in values:
            raise ConfigError(f"--rdzv-conf {key}: one of {', '.join(values)}, got {conf[key]!r}")
    return conf


def _note_unused(args: argparse.Namespace, backend: str, most: int) -> None:
    """Name what was given, and the backend that was chosen has no use for."""
    c10d = backend == "c10d"
    unused = {
        "--node-rank": c10d and args.node_rank != 0,
        "--master-addr": c10d and args.master_addr != _MASTER_ADDR,
        "--master-port": c10d and args.master_port is not None,
        "--local-addr": (backend == "static" or most == 1) and args.local_addr is not None,
    }
    names = ", ".join(option for option, is_given in unused.items() if is_given)
    if names:
        nodes = "one node" if most == 1 else "several nodes"
        _note(f"--rdzv-backend {backend} with {nodes} does not use {names}")


def _seconds(option: str, value: str | int) -> int:
    try:
        number = int(value)
    except ValueError:
        number = 0
    if number < 1:
        raise ConfigError(f"{option}: expected a whole number of at least 1, got {value}")
    return number


@dataclass(frozen=True)
class _Endpoint:
    """An address as the user gave it, or torchrun's default for it."""

    option: str
    host: str
    port: int


def _endpoint(args: argparse.Namespace, backend: str, default_port: int) -> _Endpoint:
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    master = f"{args.master_addr}:{args.master_port or default_port}"
    option, text = "--master-addr / --master-port", master
    if args.rdzv_endpoint:
        option, text = "--rdzv-endpoint", args.rdzv_endpoint
    elif backend == "c10d":
        option, text = "--rdzv-endpoint (not given)", f"localhost:{default_port}"
    try:
        host, port = parse_rendezvous_endpoint(text, default_port)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    if backend == "static" and args.rdzv_endpoint:
        other_host = args.master_addr not in (_MASTER_ADDR, host)
        if other_host or args.master_port not in (None, port):
            raise ConfigError(
                f"--rdzv-endpoint {text} and --master-addr / --master-port {master} name two"
                " addresses: give one of them"
            )
    return _Endpoint(option, host, port)


def _settle_one_node(args: argparse.Namespace, backend: str) -> None:
    if args.node_rank != 0 and backend == "static":
        raise ConfigError(f"--node-rank {args.node_rank}: with --nnodes 1 there is node 0 only")
    endpoint = _endpoint(args, backend, 0)
    where = shown(endpoint.host, endpoint.port)
    try:
        own = is_own(endpoint.host)
    except AddressError as error:
        raise ConfigError(f"{endpoint.option} {where}: {error}") from None
    if not own:
        raise ConfigError(
            f"{endpoint.option} {where}: with one node (--nnodes 1) its store is on this machine,"
            " which has no such address: leave the option out, or set --nnodes"
        )
    host = endpoint.host
    if not is_loopback(host) or host == "localhost":
        host = LOOPBACK
    if not is_loopback(endpoint.host):
        _note(f"{endpoint.option} {where}: one node uses {shown(host, endpoint.port)} instead")
    args.rdzv_backend, args.rdzv_endpoint = ONE_NODE, shown(host, endpoint.port)
    if args.rdzv_id == "none":
        args.rdzv_id = str(uuid.uuid4())


def _settle_static(args: argparse.Namespace, fewest: int, most: int) -> None:
    if fewest != most:
        raise ConfigError(
            f"--nnodes {args.nnodes} allows a varying number of nodes, which --rdzv-backend static does not"
            " support: use c10d"
        )
    if not 0 <= args.node_rank < most:
        raise ConfigError(
            f"--node-rank {args.node_rank}: with --nnodes {most} it is one of 0 to {most - 1}"
        )
    endpoint = _endpoint(args, "static", _MASTER_PORT)
    _check_port(endpoint)
    args.rdzv_backend, args.rdzv_endpoint = STATIC, shown(endpoint.host, endpoint.port)


def _settle_c10d(args: argparse.Namespace, fewest: int, most: int, in_file: bool) -> None:
    if fewest != most and not args.rdzv_endpoint:
        raise ConfigError(
            f"--nnodes {args.nnodes} needs --rdzv-endpoint HOST:PORT for the rendezvous"
        )
    if not in_file:
        endpoint = _endpoint(args, "c10d", _C10D_PORT)
        _check_port(endpoint)
        args.rdzv_endpoint = shown(endpoint.host, endpoint.port)
    args.rdzv_backend = DYNAMIC


def _check_port(endpoint: _Endpoint) -> None:
    if endpoint.port == 0:
        raise ConfigError(f"{endpoint.option}: several nodes need a fixed port, got 0")


def _note(line: str) -> None:
    print(f"note: {line}", file=sys.stderr)
