"""A campaign of faults on the test cluster: trials that a seed draws, in rounds of users at the same time."""

import random
import subprocess
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from cluster.command import ClusterError, wait_for
from kubernetes.client import ApiException
from support.campaign_faults import FAULTS
from support.campaign_users import LIGHT_KINDS, Command, Round, User
from support.waiting import processes_of
from urllib3.exceptions import HTTPError

USERS: Final = 3
"""Users of a round: each has one trial."""
_ROUNDS: Final = 4
"""One of so many rounds has faults that strike the whole cluster."""
_TRIES: Final = 5
"""How often a user types the command at most."""
_CHEAP: Final = 10
"""Weight of a kind of run that has a stand-in for torch and so starts fast; others have weight 1."""
_AGAIN: Final = 0.3
"""Share of the trials in which the second try meets a fault too."""
_MOMENTS_S: Final = {"begun": 15, "start": 4, "end": 4}
"""Line of the history after which a fault strikes -> maximum of seconds after it."""
_GONE_S: Final = 12  # for garbage collection to delete objects; ten times as long on a slow machine


class Move(NamedTuple):
    """A fault, the line of the history after which it strikes, and how many seconds after it."""

    fault: str
    after: str
    seconds: float


class Plan(NamedTuple):
    """What a trial draws: a user's name, the kind of the run, and the fault that each try meets."""

    number: int
    name: str
    kind: str
    moves: Sequence[Move]


def plans(seed: int, numbers: Sequence[int]) -> list[Plan]:
    """Draw the trials with these numbers, from 1; the same seed and number draw the same trial.

    All faults take turns. Those that strike the whole cluster have rounds of their own.
    """
    return [_plan(seed, number) for number in numbers]


def _plan(seed: int, number: int) -> Plan:
    """Draw a trial. Each turn goes through all faults of a sort, in an order that the turn draws."""
    before, user = divmod(number - 1, USERS)
    strikes_all = before % _ROUNDS == _ROUNDS - 1
    alike = before // _ROUNDS if strikes_all else before - before // _ROUNDS  # rounds of this sort before
    fitting = [name for name, one in FAULTS.items() if one.strikes_all == strikes_all]
    turn, place = divmod(alike * USERS + user, len(fitting))
    fault = _rng(seed, turn, strikes_all).sample(fitting, len(fitting))[place]
    rng = _rng(seed, number)
    kinds = FAULTS[fault].kinds
    (kind,) = rng.choices(kinds, [_CHEAP if one in LIGHT_KINDS else 1 for one in kinds])
    after = rng.choice(list(_MOMENTS_S))
    moves = [Move(fault, after, rng.uniform(0, _MOMENTS_S[after]))]
    if rng.random() < _AGAIN:
        harmful = [
            name for name, one in FAULTS.items() if one.scope in ("run", "command") and kind in one.kinds
        ]
        moves.append(Move(rng.choice(harmful), "begun", rng.uniform(0, _MOMENTS_S["begun"])))
    return Plan(number, f"c{seed}-{number}", kind, moves)


def _rng(*seeds: object) -> random.Random:
    return random.Random(" ".join(map(str, seeds)))  # noqa: S311 - the same seeds draw the same


def play(at: Round, seed: int, chosen: Sequence[Plan]) -> None:
    """Play a round: one user for each plan, all at the same time.

    The history then has what the users did, which faults they met, and what is left.
    """
    at.history.add("round", seed=seed, commit=_commit())
    at.history.add("before", objects=at.objects())
    users = [User(at, plan.name, plan.kind, _rng(plan.name)) for plan in chosen]
    with ThreadPoolExecutor(len(users)) as pool:
        list(pool.map(_live, users, [plan.moves for plan in chosen]))
    at.history.add("after", **_left(at))


def _live(user: User, moves: Sequence[Move]) -> None:
    """Type the command until it succeeds, at most five times; try n meets fault n of ``moves``."""
    for number in range(1, _TRIES + 1):
        command = user.type(str(number))
        if number == 1 and (run := user.see_name(command)):
            user.place_decoys(run)
        for move in islice(moves, number - 1, number):
            _strike(user, command, move)
        if command.end() == 0:
            user.look()
            return


def _strike(user: User, command: Command, move: Move) -> None:
    """Cause a fault at its moment, and add to the history whether it struck.

    If the command ends before that moment, the fault is not caused: it counts as missed.
    """
    while move.after != "begun" and not user.at.history.of(user.name, move.after) and not command.wait(0.05):
        pass
    command.wait(move.seconds)
    told = {"run": user.name, "fault": move.fault, "scope": FAULTS[move.fault].scope}
    if command.ended:
        user.at.history.add("missed", **told)
        return
    begun, struck = user.at.history.now(), ""
    try:
        struck = FAULTS[move.fault].cause(user, command)
    except (ApiException, AssertionError, ClusterError, HTTPError) as error:
        told["error"] = str(error)[:1000]
    user.at.history.add("fault", begun=begun, healed=user.at.history.now(), struck=struck, **told)


def _left(at: Round) -> dict[str, Collection[str]]:
    """Return the objects and processes that are left; first wait some seconds until none is a user's."""
    others = {name for line in at.history.lines for name in line.get("objects", ())}

    def left() -> dict[str, Collection[str]]:
        processes = [" ".join(one.cmdline()) for one in processes_of(at.folder)]
        return {"objects": at.objects(), "processes": processes}

    found = left()

    def gone() -> bool:
        found.update(left())
        return not found["processes"] and set(found["objects"]) <= others

    with suppress(ClusterError):
        wait_for("what runs leave to be gone", gone, seconds=_GONE_S, every=1)
    return found


def _commit() -> str:
    root = Path(__file__).parents[2]
    return subprocess.check_output(["git", "rev-parse", "--short=8", "HEAD"], cwd=root, text=True).strip()
