"""rights.yaml has exactly the rights that manycpu uses. This test runs after all others of this folder."""

import json
from pathlib import Path

import pytest

from manycpu.pipeline.spec.job_kinds import JOB_KINDS
from manycpu.pipeline.targets.kubernetes.preflight import Right, granted


@pytest.mark.last
@pytest.mark.usefixtures("cluster")
def test_every_right_is_used_and_every_call_has_its_right(
    request: pytest.FixtureRequest, used_rights: Path
) -> None:
    used_by_all = [tuple(json.loads(line)) for line in used_rights.read_text().splitlines()]
    ran = {item.path for item in request.session.items}
    if request.config.option.keyword or set(Path(__file__).parent.glob("test_*.py")) - ran:
        pytest.skip("only where the whole folder runs can it be seen which rights are used")
    role, used = {alike(right) for right in granted()}, {alike(right) for right in used_by_all}
    assert sorted(used - role) == []
    assert sorted(role - used) == []


def alike(right: Right) -> Right:
    """Replace the resource of each kind of job by `jobs`: the kinds share one rule and the same code."""
    verb, _, resource = right
    if resource in {kind.resource.plural for kind in JOB_KINDS.values()}:
        return verb, "", "jobs"
    return right
