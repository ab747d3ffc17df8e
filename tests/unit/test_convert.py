"""``ringtrain convert``: what it writes is what the source holds, whole or not there."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from ringtrain.data.formats.cifar10 import FILES, FOLDER_NAME, load_cifar10
from ringtrain.data.formats.conversion import convert
from ringtrain.data.formats.tfrecord import TFRecordSource, load_tfrecords
from ringtrain.errors import DataError, UsageError
from tests.world.processes import Finished, clean_environment, run_command


def read_all(source: TFRecordSource | None) -> tuple[np.ndarray, np.ndarray]:
    assert source is not None
    x, y = tf.function(source.gather)(tf.range(source.num_samples, dtype=tf.int64))
    return x.numpy(), y.numpy()


def read_examples(folder: Path, pattern: str) -> list[dict[str, bytes | int]]:
    paths = sorted(map(str, folder.glob(pattern)))
    found = []
    for record in tf.data.TFRecordDataset(paths).as_numpy_iterator():
        features = tf.train.Example.FromString(record).features.feature
        found.append({name: (*value.bytes_list.value, *value.int64_list.value)[0] for name, value in features.items()})
    return found


@pytest.fixture
def cifar10(tmp_path: Path) -> Path:
    """CIFAR-10's files with ten records in each, one of each class."""
    folder = tmp_path / "cifar10" / FOLDER_NAME
    folder.mkdir(parents=True)
    records = np.random.default_rng(0).integers(0, 256, (len(FILES), 10, 3_073), np.uint8)
    records[:, :, 0] = np.arange(10)
    for name, part in zip(FILES, records, strict=True):
        (folder / name).write_bytes(part.tobytes())
    return folder.parent


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Two classes of JPEG and PNG images of 6x8 pixels, with some to evaluate on."""
    generator = np.random.default_rng(0)
    for part, count in (("train", 3), ("val", 1)):
        for name in ("cat", "dog"):
            folder = tmp_path / "images" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                image = generator.integers(0, 256, (6, 8, 3), np.uint8)
                (folder / f"{number}.png").write_bytes(tf.io.encode_png(image).numpy())
                (folder / f"{number}.jpg").write_bytes(tf.io.encode_jpeg(image).numpy())
    return tmp_path / "images"


@pytest.mark.parametrize("shards", [None, 3])
def test_cifar10_is_the_same_afterwards(cifar10: Path, tmp_path: Path, shards: int | None) -> None:
    made = convert(cifar10, tmp_path / "made", num_shards=shards)
    assert made.samples == {"train": 50, "test": 10}
    assert made.num_files == len(list((tmp_path / "made").glob("*.tfrecord"))) == 2 * (shards or 1)
    assert made.num_bytes == sum(path.stat().st_size for path in (tmp_path / "made").glob("*.tfrecord"))
    sources = load_tfrecords(tmp_path / "made", image_size=None, channels=3)
    for source, (images, labels) in zip(sources, load_cifar10(cifar10), strict=True):
        x, y = read_all(source)
        np.testing.assert_array_equal(x, images)
        np.testing.assert_array_equal(y, labels)
    assert (tmp_path / "made/classes.txt").read_text().split()[3] == "cat"


def test_the_files_of_an_image_folder_are_copied_as_they_are(image_folder: Path, tmp_path: Path) -> None:
    made = convert(image_folder, tmp_path / "made")
    assert made.samples == {"train": 12, "val": 4}
    assert (tmp_path / "made/classes.txt").read_text() == "cat\ndog\n"
    for part in ("train", "val"):
        paths = sorted((image_folder / part).glob("*/*"))
        examples = read_examples(tmp_path / "made", f"{part}-*")
        assert [example["image/encoded"] for example in examples] == [path.read_bytes() for path in paths]
        assert [example["image/class/label"] for example in examples] == [path.parent.name == "dog" for path in paths]
        assert [example["image/class/text"] for example in examples] == [path.parent.name.encode() for path in paths]
        assert {(example["image/height"], example["image/width"]) for example in examples} == {(6, 8)}
        assert {example["image/format"] for example in examples} == {b"png", b"jpeg"}
    train, _ = load_tfrecords(tmp_path / "made", image_size=None, channels=3)
    images = [tf.io.decode_png(path.read_bytes()) for path in sorted((image_folder / "train").glob("*/*.png"))]
    np.testing.assert_array_equal(read_all(train)[0][1::2], images)  # a .jpg comes before its .png


def test_more_shards_than_samples_are_as_many_as_samples(image_folder: Path, tmp_path: Path) -> None:
    assert convert(image_folder, tmp_path / "made", num_shards=100).num_files == 12 + 4


def test_an_empty_destination_is_used(cifar10: Path, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    convert(cifar10, tmp_path / "made")
    assert (tmp_path / "made/train-00000-of-00001.tfrecord").is_file()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: (path.mkdir(), (path / "file").touch()), "is not empty"),
        (lambda path: path.touch(), "is a file"),
        (lambda path: path.symlink_to("nowhere"), "is a file"),
    ],
    ids=["not empty", "a file", "a broken link"],
)
def test_existing_files_are_not_overwritten(
    cifar10: Path, tmp_path: Path, make: Callable[[Path], object], said: str
) -> None:
    make(tmp_path / "made")
    with pytest.raises(UsageError, match=f"{said}; name a directory that does not exist yet"):
        convert(cifar10, tmp_path / "made")
    with pytest.raises(UsageError, match="is within the source"):
        convert(cifar10, cifar10 / "made")


def test_a_failed_conversion_leaves_no_files(image_folder: Path, tmp_path: Path) -> None:
    (image_folder / "train/dog/1.png").write_bytes(b"no image")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=r"train/dog/1\.png is no image"):
        convert(image_folder, tmp_path / "made")
    assert sorted(tmp_path.iterdir()) == before


def test_a_destination_that_cannot_be_made_is_named(cifar10: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file/made cannot be written: .*File exists"):
        convert(cifar10, tmp_path / "file" / "made")


def test_a_source_of_unknown_kind_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is neither an image folder.* nor a place of CIFAR-10.*--kind"):
        convert(tmp_path, tmp_path.with_name("made"))
    with pytest.raises(DataError, match=r"the folder .*train does not exist"):
        convert(tmp_path, tmp_path.with_name("made"), kind="image_folder")


def run_convert(*arguments: str | Path) -> Finished:
    """The command in a process of its own: what TensorFlow says at its start is said once in a process."""
    command = [sys.executable, "-m", "ringtrain", "convert", *map(str, arguments)]
    return run_command(command, env=clean_environment(), timeout=120)


def test_the_command_summarizes_its_output_in_one_line(cifar10: Path, tmp_path: Path) -> None:
    finished = run_convert(cifar10, tmp_path / "made", "--shards", "2", "--kind", "cifar10")
    assert (finished.rc, finished.stderr) == (0, "")
    [line] = finished.stdout.splitlines()
    assert line.startswith(f"{tmp_path / 'made'}: 50 train, 10 test samples of 10 classes in 4 files, ")


def test_a_missing_source_gives_a_one_line_error(tmp_path: Path) -> None:
    finished = run_convert(tmp_path / "a", tmp_path / "b")
    assert finished.rc == 3
    [line] = finished.stderr.splitlines()
    assert line.startswith(f"ringtrain: error: source {tmp_path / 'a'} is no directory that can be read")
