"""A new reason why a job waits is reported."""

from manycpu.pipeline.targets.kubernetes.following.follower import Notes


def test_of_several_reasons_those_that_are_new_are_told() -> None:
    clock = [0.0]
    notes = Notes(lambda: clock[0], lambda: None)

    def told(reason: str) -> list[str]:
        clock[0] += 20
        notes.add_new_reasons(reason)
        return [line.text for line in notes.take()]

    assert told("suspended\nnumber 2") == ["suspended", "number 2"]
    assert told("suspended\nnumber 2") == []
    assert told("suspended\nnumber 1") == ["number 1"]
    assert told("number 1") == []
    assert told("suspended\nnumber 1") == ["suspended"]
