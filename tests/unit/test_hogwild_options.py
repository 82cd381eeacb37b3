"""The recipe's options: those of PyTorch's example, with its defaults, and the threads of each process."""

import pytest

from manycpu.pipeline.recipes.hogwild.options import parse, threads
from manycpu.pipeline.spec.errors import BadInputError

EXAMPLE = (
    *("--num-processes", "4", "--batch-size", "64", "--test-batch-size", "1000", "--epochs", "10"),
    *("--lr", "0.01", "--momentum", "0.5", "--seed", "1", "--log-interval", "10", "--dry-run"),
)


def test_the_examples_options_and_defaults() -> None:
    chosen, default = parse(EXAMPLE, {}), parse([], {})
    assert (chosen.num_processes, chosen.dry_run) == (4, True)
    assert (default.num_processes, default.dry_run, default.save_model) == (2, False, False)
    same = ("batch_size", "test_batch_size", "epochs", "lr", "momentum", "seed", "log_interval")
    assert [getattr(default, name) for name in same] == [64, 1000, 10, 0.01, 0.5, 1, 10]
    assert [getattr(chosen, name) for name in same] == [getattr(default, name) for name in same]
    assert (default.mode, default.start_method, default.notes) == ("shared", "spawn", ())


def test_the_run_says_how_many_processes_there_are_unless_the_option_does() -> None:
    env = {"MANYCPU_SUBPROCESSES": "6"}
    assert parse([], env).num_processes == 6
    assert parse(["--num-processes", "3"], env).num_processes == 3


def test_other_devices_are_left_out_aloud_or_refused() -> None:
    chosen = parse(["--cuda", "--mps", "--device", "cpu", "--save_model"], {})
    assert [note.partition(":")[0] for note in chosen.notes] == ["--cuda", "--mps"]
    assert chosen.save_model
    with pytest.raises(BadInputError, match="--device xpu"):
        parse(["--device", "xpu"], {})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--num-processes", "0"], "--num-processes 0 cannot be used"),
        (["--epochs", "-1"], "--epochs -1 cannot be used"),
        (["--lr", "nan"], "--lr nan cannot be used"),
        (["--lr", "0"], "--lr 0.0 cannot be used"),
        (["--momentum", "1"], "--momentum 1.0 cannot be used"),
        (["--average-every", "0"], "--average-every 0 cannot be used"),
        (["--threads-per-process", "-1"], "--threads-per-process -1 cannot be used"),
        (["--mode", "locked"], "invalid choice: 'locked'"),
        (["--epoch", "3"], "unrecognized arguments: --epoch 3"),
    ],
)
def test_what_cannot_be_used_is_said_before_anything_starts(words: list[str], said: str) -> None:
    with pytest.raises(BadInputError, match=said) as raised:
        parse(words, {})
    assert (raised.value.field, bool(raised.value.fix)) == ("run.args", True)


def test_one_model_in_memory_is_one_ranks() -> None:
    with pytest.raises(BadInputError, match="there are 2 ranks"):
        parse([], {"WORLD_SIZE": "2"})
    assert parse(["--mode", "averaged"], {"WORLD_SIZE": "2"}).averaged


@pytest.mark.parametrize(
    ("words", "env", "number"),
    [
        # The plan knows of the processes, or does not: each gets its part of the rank's cores.
        (["--num-processes", "4"], {"MANYCPU_THREADS": "2", "MANYCPU_SUBPROCESSES": "4"}, 2),
        (["--num-processes", "4"], {"MANYCPU_THREADS": "8"}, 2),
        (["--num-processes", "4"], {"MANYCPU_THREADS": "2"}, 1),
        (["--num-processes", "2", "--threads-per-process", "16"], {"MANYCPU_THREADS": "2"}, 16),
        (["--num-processes", "2", "--threads-per-process", "0"], {"MANYCPU_THREADS": "2"}, 5),
        (["--num-processes", "2"], {"MANYCPU_THREADS": "3", "MANYCPU_USER_ENV": "A,OMP_NUM_THREADS"}, 5),
    ],
)
def test_threads_of_each_process(words: list[str], env: dict[str, str], number: int) -> None:
    assert threads(parse(words, env), env, default=5) == number
