"""One bridge, and per node a network namespace on a cable of its own."""

from __future__ import annotations

import ipaddress
import json
import subprocess
from pathlib import Path

from .config import CONTROLLER_PORT, DBD_PORT, SRUN_PORTS, ClusterConfig, Site, short
from .errors import ClusterError
from .system import command

BRIDGE, RANK_BRIDGE = "cddp0", "cddp1"


def cable(node: str) -> str:
    """The host's end of the node's cable."""
    return f"cddp-{short(node)}"


def rank_cable(node: str) -> str:
    """That of its second network."""
    return f"cddpr-{short(node)}"


def namespace(root: Path, node: str) -> Path:
    """Where the namespace is held. Not /run/netns: `ip netns` would leave a mount of its own there."""
    return root / "net" / node


def free_subnet() -> str:
    """A private network that this machine has no route into."""
    routes = json.loads(command(["ip", "-json", "route", "show", "table", "all"]))
    taken = [ipaddress.ip_network(r["dst"], strict=False) for r in routes if r["dst"][0].isdigit() and "." in r["dst"]]
    for third in range(77, 255):
        subnet = ipaddress.ip_network(f"10.213.{third}.0/24")
        if not any(subnet.overlaps(other) for other in taken if isinstance(other, ipaddress.IPv4Network)):
            return str(subnet)
    raise ClusterError("no free network: this machine has routes into all of 10.213.0.0/16")


def lay(config: ClusterConfig, site: Site) -> None:
    """The nodes get no default route: with one, every reverse look-up waits for the resolver's timeout."""
    address = f"addr add {site.bridge_address}/24 dev {BRIDGE}"
    batch([f"link add {BRIDGE} type bridge", address, f"link set {BRIDGE} up"])
    for node in config.node_names:
        path = namespace(site.root, node)
        path.parent.mkdir(exist_ok=True)
        path.touch()
        command(["unshare", f"--net={path}", "true"])
        batch(
            [
                f"link add {cable(node)} type veth peer name eth0 netns {path}",
                f"link set {cable(node)} master {BRIDGE} up",
            ]
        )
        batch(["link set lo up", f"addr add {site.address(node)}/24 dev eth0", "link set eth0 up"], inside=path)
    if config.rank_network:
        batch([f"link add {RANK_BRIDGE} type bridge", f"link set {RANK_BRIDGE} up"])
        for node in config.node_names:
            _lay_second(node, site)


def _lay_second(node: str, site: Site) -> None:
    """Another network for the node, without this host. What ``ip rule`` refuses, the first one no longer carries."""
    path, name = namespace(site.root, node), rank_cable(node)
    others = f"to {next(ipaddress.ip_network(site.subnet).subnets())} ipproto tcp"
    slurm = (f"{CONTROLLER_PORT}-{DBD_PORT}", SRUN_PORTS)
    allowed = [f"rule add pref 10 {others} {end} {ports} lookup main" for end in ("sport", "dport") for ports in slurm]
    host = f"rule add pref 9 to {site.bridge_address} lookup main"
    batch([f"link add {name} type veth peer name ib0 netns {path}", f"link set {name} master {RANK_BRIDGE} up"])
    batch(
        [
            f"addr add {site.rank_address(node)}/25 dev ib0",
            "link set ib0 up",
            *(host, *allowed, f"rule add pref 11 {others} prohibit"),
        ],
        inside=path,
    )


def clear(nodes: list[str]) -> None:
    """Removes the cables and the bridges; the namespaces end with their last process and mount."""
    for name in [*map(cable, nodes), *map(rank_cable, nodes), BRIDGE, RANK_BRIDGE]:
        subprocess.run(["ip", "link", "delete", name], capture_output=True)


def set_cable(node: str, *, up: bool) -> None:
    command(["ip", "link", "set", cable(node), "up" if up else "down"])


def batch(lines: list[str], inside: Path | None = None) -> None:
    enter = ["nsenter", f"--net={inside}"] if inside else []
    command([*enter, "ip", "-batch", "-"], stdin="\n".join(lines) + "\n")
