"""Choose the network interface that the ranks use."""

import ipaddress
import os
from typing import Final

from manycpu.pipeline.node.emit import warn
from manycpu.pipeline.node.proof import Meeting
from manycpu.pipeline.spec.kernel import address_towards, interface_of

__all__ = ["choose_interface"]

_ANY_PORT: Final = 9


def choose_interface(meeting: Meeting) -> None:
    """Set GLOO_SOCKET_IFNAME where nobody did: gloo left alone may bind to an address that no other reaches.

    On one machine that is the loopback; between machines never.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME") or meeting.world_size == 1:
        return
    address = _address(meeting)
    name = interface_of(address)
    if name is None:
        warn(f"no interface has the address {address!r}: gloo chooses one by itself; set GLOO_SOCKET_IFNAME")
        return
    os.environ["GLOO_SOCKET_IFNAME"] = name


def _address(meeting: Meeting) -> str:
    me = (meeting.me["host"], meeting.me["address"])
    others = [record for record in meeting.records if (record["host"], record["address"]) != me]
    if not others:
        return "127.0.0.1"
    mine = str(meeting.me["address"])
    if mine and not ipaddress.ip_address(mine).is_loopback:
        return mine
    # The host of the meeting point reaches itself over the loopback: ask the way to one of the others.
    return _towards(str(others[0]["address"]))


def _towards(address: str) -> str:
    try:
        return address_towards(address, _ANY_PORT)
    except OSError:
        return ""
