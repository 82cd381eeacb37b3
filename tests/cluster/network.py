"""The cluster's network: a veth pair to the machine, and a bridge for the pods of each node."""

from ipaddress import ip_address, ip_network

import psutil
from cluster.command import run
from cluster.namespace import Namespace
from cluster.settings import ADDRESS, INTERFACE, MACHINE_ADDRESS, NODES, PODS, PREFIX, SERVICES, Node

INSIDE = "front"


def create(namespace: Namespace) -> None:
    """Connect the machine and the cluster. The interfaces disappear with the cluster's namespace."""
    run(["ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", INSIDE, "netns", str(namespace.pid)])
    run(["ip", "address", "add", f"{MACHINE_ADDRESS}/{PREFIX}", "dev", INTERFACE])
    run(["ip", "link", "set", INTERFACE, "up"])
    # The machine reaches pods, as a worker in a pod of the same cluster would.
    run(["ip", "route", "add", PODS, "via", ADDRESS, "dev", INTERFACE])
    namespace.run("ip", "address", "add", f"{ADDRESS}/{PREFIX}", "dev", INSIDE)
    namespace.run("ip", "link", "set", INSIDE, "up")
    # kube-proxy rewrites service addresses, but a packet needs a route before it reaches those rules.
    namespace.run("ip", "route", "add", SERVICES, "dev", INSIDE, "src", ADDRESS)
    for node in NODES:
        bridge(namespace, node)


def bridge(namespace: Namespace, node: Node) -> None:
    # By itself a bridge takes over the lowest address of its ports, and pods that come and go change it: then
    # other pods send to an old one.
    address = f"02:00:00:00:00:{node.number:02x}"
    namespace.run("ip", "link", "add", node.bridge, "address", address, "type", "bridge")
    namespace.run("ip", "address", "add", f"{node.address}/24", "dev", node.bridge)
    namespace.run("ip", "link", "set", node.bridge, "up")


def remove() -> None:
    """Remove the veth pair now: the kernel itself would do so only after the last connection is closed."""
    if INTERFACE in psutil.net_if_addrs():
        run(["ip", "link", "delete", INTERFACE])


def in_the_way() -> str | None:
    """Return the machine's interface whose name or address collides with the cluster's network, or None."""
    ours = ip_network(PODS)
    for name, addresses in psutil.net_if_addrs().items():
        seen = [a.address for a in addresses if "." in a.address]
        if name == INTERFACE or any(ip_address(address) in ours for address in seen):
            return f"{name} ({', '.join(seen) or 'no address'})"
    return None


FAULT_TABLE = "manycpu_cut"


def cut(namespace: Namespace, node: Node) -> None:
    """Drop packets between a node's pod network and everything outside the node."""
    rules = f"""
        table inet {FAULT_TABLE} {{
            chain forward {{
                type filter hook forward priority -10; policy accept;
                iifname "{node.bridge}" oifname != "{node.bridge}" drop
                oifname "{node.bridge}" iifname != "{node.bridge}" drop
            }}
            chain input {{
                type filter hook input priority -10; policy accept;
                iifname "{node.bridge}" ip daddr != {node.address} drop
            }}
        }}"""
    namespace.run("nft", rules)


def mend(namespace: Namespace) -> None:
    namespace.run("nft", "delete", "table", "inet", FAULT_TABLE)
