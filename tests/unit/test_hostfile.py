"""Hostfiles of all three MPIs."""

import pytest

from manycpu.pipeline.adapters.hosts import parse_hostfile
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.placement import Host


def test_every_form() -> None:
    text = "# cluster\nnode-a\n\nnode-b:2  # two\nnode-c slots=4 max_slots=8\n10.0.0.7:3\n"
    assert parse_hostfile(text) == (
        Host("node-a"),
        Host("node-b", 2),
        Host("node-c", 4),
        Host("10.0.0.7", 3),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no host"),
        ("# only a comment\n", "names no host"),
        ("node-a\nnode-b\nnode-a:2\n", "line 3 names the host 'node-a' a second time"),
        ("node-a:0", "'0' processes"),
        ("node-a:two", "'two' processes"),
        ("node-a:", "'' processes"),
        ("node-a slots=-1", "'-1' processes"),
        ("node-a slot=1", "'slot', which is no setting of a host"),
        ("node-a node-b", "line 1 cannot be read"),
        ("-oProxyCommand=reboot", "line 1 cannot be read"),
        ("node a:b:c", "line 1 cannot be read"),
        ("[fd00::7]", "line 1 cannot be read: .* a host with an IPv6 address alone needs a name"),
    ],
)
def test_what_cannot_be_used(text: str, message: str) -> None:
    with pytest.raises(BadInputError, match=message) as error:
        parse_hostfile(text)
    assert error.value.field == "target.hostfile"
    assert error.value.fix
