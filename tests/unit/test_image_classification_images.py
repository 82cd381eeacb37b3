"""The images of a folder: classes by name or by folder, one split for all ranks, and what is wrong."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from manycpu.pipeline.recipes.image_classification import images
from manycpu.pipeline.recipes.image_classification.images import LABEL_PATTERN
from manycpu.pipeline.spec.errors import BadInputError


def drawn(folder: Path, names: Sequence[str]) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 30), (len(name) * 7 % 256, 3, 5)).save(path)
    return folder


def test_names_tell_the_class_as_the_tutorial_has_it(tmp_path: Path) -> None:
    drawn(tmp_path, ["great_dane_2.jpg", "beagle_32.jpg", "great_dane_11.jpg"])
    (tmp_path / "beagle.mat").touch()
    (tmp_path / "._beagle_1.jpg").touch()
    found = images.read(tmp_path, LABEL_PATTERN)
    assert [file.name for file in found.files] == ["beagle_32.jpg", "great_dane_11.jpg", "great_dane_2.jpg"]
    assert (found.labels, found.classes) == ((0, 1, 1), ("beagle", "great_dane"))


def test_a_pattern_of_ones_own_tells_the_class(tmp_path: Path) -> None:
    drawn(tmp_path, ["1-cat.png", "2-dog.png", "3-dog.PNG"])
    assert images.read(tmp_path, r"-(\w+)\.(?i:png)$").classes == ("cat", "dog")


def test_without_images_of_its_own_each_folder_of_it_is_a_class(tmp_path: Path) -> None:
    drawn(tmp_path, ["dog/b.jpg", "cat/old/a.png", "cat/z.webp"])
    found = images.read(tmp_path, LABEL_PATTERN)
    assert [(file.name, found.classes[label]) for file, label in zip(*found[:2], strict=True)] == [
        ("a.png", "cat"),
        ("z.webp", "cat"),
        ("b.jpg", "dog"),
    ]


def test_a_fifth_is_split_off_the_same_for_everyone_who_has_the_seed(tmp_path: Path) -> None:
    drawn(tmp_path, [f"{name}_{i}.jpg" for name in ("a", "b") for i in range(25)])
    found = images.read(tmp_path, LABEL_PATTERN)
    split = images.split(found, 42)
    assert split == images.split(images.read(tmp_path, LABEL_PATTERN), 42)
    assert split != images.split(found, 43)
    assert (len(split.train.files), len(split.evaluation.files)) == (40, 10)
    assert sorted(split.train.files + split.evaluation.files) == list(found.files)
    for file, label in zip(split.evaluation.files, split.evaluation.labels, strict=True):
        assert file.name.startswith(found.classes[label])


@pytest.mark.parametrize(
    ("names", "pattern", "said"),
    [
        ([], LABEL_PATTERN, "there is no image in"),
        (["notes.txt"], LABEL_PATTERN, "there is no image in"),
        (["a_1.jpg", "b_2.png"], LABEL_PATTERN, r"'b_2\.png' has no class by the pattern \^\(\.\*\)_"),
        (["_1.jpg", "b_2.jpg"], LABEL_PATTERN, r"'_1\.jpg' has no class"),
        (["a_1.jpg", "a_2.jpg"], LABEL_PATTERN, "all images in .* are of one class, 'a'"),
        (["a/1.jpg", "a/2.jpg"], LABEL_PATTERN, "all images in .* are of one class, 'a'"),
        (["train/cat/1.jpg", "Val/dog/1.jpg"], LABEL_PATTERN, "the classes of .* would be Val, train"),
        (["train_1.jpg", "test_1.jpg"], LABEL_PATTERN, "the classes of .* would be test, train"),
        (["a_1.jpg"], "(", r"--label_pattern \(: missing \), unterminated subpattern"),
        (["a_1.jpg"], "^a", r"--label_pattern \^a has no group"),
    ],
)
def test_a_folder_that_cannot_be_learned_from_is_bad_input(
    names: list[str], pattern: str, said: str, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    with pytest.raises(BadInputError, match=said):
        images.read(tmp_path, pattern)


@pytest.mark.parametrize("folder", [None, "nowhere"])
def test_a_folder_must_be_there(folder: str | None) -> None:
    with pytest.raises(BadInputError, match=r"run\.data: there (are no images|is no image in nowhere)"):
        images.read(folder, LABEL_PATTERN)


def test_every_rank_needs_a_whole_batch(tmp_path: Path) -> None:
    split = images.split(
        images.read(drawn(tmp_path, [f"{i % 2}_{i}.jpg" for i in range(10)]), LABEL_PATTERN), 1
    )
    images.check_sizes(len(split.train.files), 4, 2)
    with pytest.raises(
        BadInputError, match=r"8 images to train on are too few.* takes 10.* --batch_size 4 or less"
    ):
        images.check_sizes(len(split.train.files), 5, 2)
    with pytest.raises(BadInputError, match="Give more images, or use fewer ranks"):
        images.check_sizes(len(split.train.files), 1, 9)


def test_an_image_that_is_cut_short_or_none_at_all_is_named(tmp_path: Path) -> None:
    drawn(tmp_path, ["a_1.jpg", "a_2.jpg"])
    whole, cut, text = (tmp_path / name for name in ("a_1.jpg", "a_2.jpg", "a_3.png"))
    assert images.broken([whole, cut]) is None
    cut.write_bytes(cut.read_bytes()[:-40])
    text.write_text("no image")
    assert re.match(f"{cut}: .*truncated", images.broken([whole, cut]) or "", re.IGNORECASE)
    assert (images.broken([whole, text]) or "").startswith(f"{text}: cannot identify image file")


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_an_image_whose_brightness_would_be_cut_off_is_named(tmp_path: Path, mode: str) -> None:
    file = tmp_path / "a_1.tif"
    Image.new(mode, (20, 30), 300).save(file)
    assert images.broken([file]) == f"{file}: it has more than 8 bits per channel ({mode}); convert it"
