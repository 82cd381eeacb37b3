"""The data that the recipe takes, and what it says of data and options that it cannot use."""

import json
from pathlib import Path

import pytest
from support.tiny_bert import run

from manycpu.pipeline.recipes.question_answering import squad
from manycpu.pipeline.spec.errors import BadInputError

pytestmark = [
    # torch's own: its export of a scheduler's state, and the loader's advice on processes.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


@pytest.mark.parametrize(
    ("words", "changes", "said"),
    [
        ((), {"MANYCPU_DATA": ""}, "run.data: there is no data set"),
        ((), {"MANYCPU_MODEL": ""}, "run.model: there is no base checkpoint"),
        ((), {"MANYCPU_MODEL": "/nowhere"}, "run.model: the checkpoint '/nowhere' cannot be loaded"),
        (("--train_file", "nowhere.json"), {}, "run.args: there is no file nowhere.json"),
        (("--train_file", __file__), {}, "is neither .json nor .parquet"),
        (("--do_predict",), {}, "run.data: there is no test split; there is train, validation"),
        (
            ("--max_seq_length", "16", "--doc_stride", "16"),
            {},
            "run.args: --max_seq_length 16 leaves 8 tokens",
        ),
        (("--config_overrides", "no_such=1"), {}, "run.args: --config_overrides no_such=1"),
        (("--max_train_samples", "0"), {}, "run.args: --max_train_samples 0"),
    ],
)
def test_bad_input_names_its_field(
    env: dict[str, str], words: tuple[str, ...], changes: dict[str, str], said: str
) -> None:
    with pytest.raises(BadInputError) as raised:
        run(env | changes, *words)
    assert said in str(raised.value)


def test_data_without_a_train_split_is_refused_unless_the_options_leave_out_training(
    env: dict[str, str],
) -> None:
    (Path(env["MANYCPU_DATA"]) / "train.json").rename(Path(env["MANYCPU_DATA"]) / "squad_train.json")
    with pytest.raises(BadInputError, match=r"run\.data: there is no train split; there is validation"):
        run(env)
    assert "exact_match" in run(env, "--do_eval")


def test_training_needs_an_answer_that_fits(env: dict[str, str]) -> None:
    path = Path(env["MANYCPU_DATA"]) / "train.json"
    document = json.loads(path.read_text())
    for article in document["data"]:
        (paragraph,) = article["paragraphs"]
        paragraph["qas"][0]["answers"] = [{"text": paragraph["context"], "answer_start": 0}]
    path.write_text(json.dumps(document))
    with pytest.raises(
        BadInputError, match=r"run\.data: no training question has an answer that fits into 16 tokens"
    ):
        run(env, "--max_seq_length", "16", "--doc_stride", "2")


def test_a_damaged_data_set_ends_the_run_with_its_place(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "data" / "train.json").write_text('{"data": []}')
    with pytest.raises(BadInputError, match=r"run\.data: .*train\.json holds no question"):
        run(env)


@pytest.fixture
def hub(env: dict[str, str], tmp_path: Path) -> Path:
    """Store the data set as the Hub stores rajpurkar/squad."""
    from datasets import Dataset  # type: ignore[import-untyped]

    folder = tmp_path / "hub" / "plain_text"
    folder.mkdir(parents=True)
    for split in ("train", "validation"):
        rows = [
            {
                "id": asked.id,
                "title": asked.title,
                "context": asked.context,
                "question": asked.question,
                "answers": {"text": list(asked.texts), "answer_start": list(asked.starts)},
            }
            for asked in squad.load(Path(env["MANYCPU_DATA"]) / f"{split}.json")
        ]
        Dataset.from_list(rows).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return folder.parent


def test_parquet_as_the_hub_stores_it_is_read(env: dict[str, str], hub: Path) -> None:
    found = run(env | {"MANYCPU_DATA": str(hub)}, "--max_steps", "1")
    assert found["train_steps"] == 1
    assert len(json.loads((Path(env["MANYCPU_OUTPUT"]) / "eval_predictions.json").read_text())) == 7


def test_a_data_set_given_by_name_wins_over_the_runs(env: dict[str, str], hub: Path) -> None:
    # A folder goes through the same loader as a name on the Hub.
    (Path(env["MANYCPU_DATA"]) / "train.json").write_text("not looked at")
    found = run(env, "--dataset_name", str(hub), "--max_steps", "1")
    assert found["train_steps"] == 1


def test_a_data_set_without_a_needed_column_is_told(env: dict[str, str], hub: Path) -> None:
    from datasets import Dataset

    file = hub / "plain_text" / "validation-00000-of-00001.parquet"
    Dataset.from_parquet(str(file), cache_dir=str(hub / "cache")).rename_column(
        "answers", "labels"
    ).to_parquet(file)
    with pytest.raises(
        BadInputError, match=r"run\.data: the validation split has no column 'answers'; it has id"
    ):
        run(env | {"MANYCPU_DATA": str(hub)})


def test_questions_of_one_id_in_parquet_are_told(env: dict[str, str], hub: Path) -> None:
    from datasets import Dataset, concatenate_datasets

    file = hub / "plain_text" / "validation-00000-of-00001.parquet"
    table = Dataset.from_parquet(str(file), cache_dir=str(hub / "cache"))
    concatenate_datasets([table, table]).to_parquet(file)
    with pytest.raises(
        BadInputError, match=r"run\.data: the validation split: the id 'validation-0' names 2 questions"
    ):
        run(env | {"MANYCPU_DATA": str(hub)})
    run(env | {"MANYCPU_DATA": str(hub)}, "--do_train", "--max_steps", "1")  # nothing is written by their ids


def test_a_data_set_of_the_hub_that_cannot_be_had_is_told(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As HF_HUB_OFFLINE=1 does before the import: without it the Hub's client tries for 23 s.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(BadInputError, match=r"run\.args: the data set 'no/such' cannot be loaded.*HF_TOKEN"):
        run(env, "--dataset_name", "no/such")
