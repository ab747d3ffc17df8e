"""TFRecord files: any record at once, and what is wrong with a file is found, named and survived where it can be."""

import contextlib
import hashlib
import os
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from ringtrain.data.formats import tfrecord_index
from ringtrain.data.formats.conversion import make_example
from ringtrain.data.formats.tfrecord import TFRecordSource, load_tfrecords
from ringtrain.data.unreadable import find_unreadable
from ringtrain.errors import DataError
from ringtrain.files import cache_directory
from tests.unit.images import in_pipeline
from tests.world.processes import REPOSITORY, clean_environment, run_command

IMAGES = np.random.default_rng(0).integers(0, 256, (12, 5, 7, 3), np.uint8)
LABELS = np.arange(12) % 3
ALL = np.arange(12)


def raw(number: int, **changes: bytes | int) -> bytes:
    features: dict[str, bytes | int] = {
        "image/raw": IMAGES[number].tobytes(),
        "image/height": 5,
        "image/width": 7,
        "image/channels": 3,
        "image/class/label": int(LABELS[number]),
    }
    return make_example({**features, **{name.replace("_", "/"): value for name, value in changes.items()}})


def encoded(number: int, image: bytes | None = None) -> bytes:
    image = tf.io.encode_png(IMAGES[number]).numpy() if image is None else image
    return make_example({"image/encoded": image, "image/class/label": int(LABELS[number])})


def write(path: Path, records: list[bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    return path


@pytest.fixture(params=["encoded", "raw"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Twelve records in three files, the second of which has one alone."""
    records = [raw(number) if request.param == "raw" else encoded(number) for number in range(12)]
    for name, part in (("0", records[:4]), ("1", records[4:5]), ("2", records[5:])):
        write(tmp_path / f"train-{name}.tfrecord", part)
    return tmp_path


def open_tfrecords(folder: Path, *, size: int | None = None, index_dir: Path | None = None) -> TFRecordSource:
    """The samples to train on."""
    return load_tfrecords(folder, image_size=size, channels=3, index_dir=index_dir)[0]


def gather(source: TFRecordSource, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x, y = in_pipeline(source.gather, indices)
    return x, y


def unreadable_numbers(source: TFRecordSource) -> list[int]:
    return [sample.number for sample in find_unreadable(source, range(source.num_samples))]


def damage(path: Path, place: int, *, record: int = 0) -> None:
    """Flip a bit at a place in a record."""
    content = bytearray(path.read_bytes())
    content[record_offset(content, record) + place] ^= 1
    path.write_bytes(content)


def record_offset(content: bytes | bytearray, record: int) -> int:
    offset = 0
    for _ in range(record):
        offset += 16 + int.from_bytes(content[offset : offset + 8], "little")
    return offset


# --- What is whole ---


def test_any_order_reads_the_records_of_sequential_reading(folder: Path) -> None:
    paths = sorted(map(str, folder.glob("*.tfrecord")))
    in_sequence = [tf.train.Example.FromString(record) for record in tf.data.TFRecordDataset(paths).as_numpy_iterator()]
    labels = [example.features.feature["image/class/label"].int64_list.value[0] for example in in_sequence]
    source = open_tfrecords(folder)
    assert source.num_samples == 12
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(12)
        x, y = gather(source, order)
        np.testing.assert_array_equal(x, IMAGES[order])
        np.testing.assert_array_equal(y, np.array(labels)[order])


def test_an_empty_batch_is_one_of_the_shape_that_the_graph_knows(folder: Path) -> None:
    source = open_tfrecords(folder)
    x, y = tf.data.Dataset.from_tensors(tf.constant([0], tf.int64)).map(source.gather).element_spec
    assert (x.shape.as_list(), y.shape.as_list()) == ([1, 5, 7, 3], [1])
    x, y = gather(source, np.array([], np.int64))
    assert (x.shape, x.dtype.name, y.shape, y.dtype.name) == ((0, 5, 7, 3), "uint8", (0,), "int64")


def test_images_of_different_sizes_are_resized_to_a_given_size(tmp_path: Path) -> None:
    larger = tf.io.encode_png(np.full((9, 4, 3), 77, np.uint8)).numpy()
    grey = tf.io.encode_jpeg(np.full((6, 6, 1), 50, np.uint8)).numpy()
    write(tmp_path / "train.tfrecord", [encoded(0, larger), encoded(1, larger), encoded(2, grey)])
    with pytest.raises(DataError, match=r"record 2 .* 6x6 with 1 channels .* of 9x4 with 3 .*must be with 3 channels"):
        open_tfrecords(tmp_path)
    x, _ = gather(open_tfrecords(tmp_path, size=5), np.arange(3))
    assert x.shape == (3, 5, 5, 3)
    assert [np.unique(image).tolist() for image in x] == [[77], [77], [50]]
    write(tmp_path / "train.tfrecord", [encoded(0), encoded(1, larger), encoded(2)])
    with pytest.raises(DataError, match=r"record 1 .* 9x4 with 3 .*the first is of 5x7 .*must be of one size"):
        open_tfrecords(tmp_path)


def test_raw_and_encoded_images_are_resized_equally(tmp_path: Path) -> None:
    images = []
    for name, records in {"raw": [raw(0), raw(1), raw(2)], "encoded": [encoded(0), encoded(1), encoded(2)]}.items():
        write(tmp_path / name / "train.tfrecord", records)
        images.append(gather(open_tfrecords(tmp_path / name, size=4), np.arange(3))[0])
    assert images[0].shape == (3, 4, 4, 3)
    np.testing.assert_array_equal(images[0], images[1])


def test_validation_and_test_are_found(tmp_path: Path) -> None:
    write(tmp_path / "test-00000-of-00001.tfrecord", [raw(1), raw(0)])
    with pytest.raises(DataError, match=r"has no files train-\*\.tfrecord.*ringtrain convert"):
        open_tfrecords(tmp_path)
    write(tmp_path / "train.tfrecord", [raw(number) for number in range(3)])
    _, test = load_tfrecords(tmp_path, image_size=None, channels=3)
    assert test is not None
    np.testing.assert_array_equal(gather(test, np.array([1, 0]))[0], IMAGES[:2])
    write(tmp_path / "validation-0.tfrecord", [raw(2, image_height=7, image_width=5)])
    with pytest.raises(DataError, match=r"record 0 .*validation-0.* 7x5 .*one size"):
        open_tfrecords(tmp_path)


def test_more_files_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringtrain.data.formats.tfrecord._MAX_OPEN_FILES", 2)
    for number in range(6):
        write(tmp_path / f"train-{number}.tfrecord", [raw(number)])
    source = open_tfrecords(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    order = np.array([0, 5, 1, 4, 0, 3, 5])
    np.testing.assert_array_equal(gather(source, order)[0], IMAGES[order])
    assert len(os.listdir("/proc/self/fd")) <= before + 2


# --- The index ---


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are read from their beginning to their end."""
    names: list[str] = []
    scan = tfrecord_index.scan_file

    def count(path: Path, number: int) -> np.ndarray:
        names.append(path.name)
        return scan(path, number)

    monkeypatch.setattr(tfrecord_index, "scan_file", count)
    return names


def test_the_index_is_made_once(folder: Path, scanned: list[str]) -> None:
    first = open_tfrecords(folder, index_dir=folder / "run")
    assert scanned == ["train-0.tfrecord", "train-1.tfrecord", "train-2.tfrecord"]
    again = open_tfrecords(folder, index_dir=folder / "run")
    assert len(scanned) == 3
    assert again.fingerprint == first.fingerprint
    np.testing.assert_array_equal(gather(again, ALL)[0], IMAGES)


def spoil_content(index: Path) -> None:
    content = bytearray(index.read_bytes())
    content[-20] ^= 1
    index.write_bytes(content)


SPOILT: dict[str, Callable[[Path], object]] = {
    "flipped bit": spoil_content,
    "cut off": lambda index: index.write_bytes(index.read_bytes()[:-10]),
    "empty": lambda index: index.write_bytes(b""),
    "something else": lambda index: index.write_bytes(b"x" * 500),
    "of older files": lambda index: os.utime(index.parent / "train-1.tfrecord", ns=(1, 1)),
    "of fewer files": lambda index: write(index.parent / "train-3.tfrecord", [raw(0)]).rename(
        index.parent / "train-1.tfrecord"
    ),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_a_stale_or_damaged_index_is_made_again(
    tmp_path: Path, scanned: list[str], spoil: Callable[[Path], object]
) -> None:
    for number, part in enumerate(np.split(ALL, 3)):
        write(tmp_path / f"train-{number}.tfrecord", [raw(sample) for sample in part])
    open_tfrecords(tmp_path)
    [index] = tmp_path.glob(".*.index")
    spoil(index)
    for _ in range(2):
        open_tfrecords(tmp_path)
        assert len(scanned) == 6
    assert not list(tmp_path.glob(".writing-*"))


def test_data_are_read_without_a_writable_index(folder: Path) -> None:
    (folder / "file").touch()
    source = open_tfrecords(folder, index_dir=folder / "file")
    np.testing.assert_array_equal(gather(source, ALL)[0], IMAGES)


def test_the_fingerprint_covers_content_and_shape(tmp_path: Path) -> None:
    records = [raw(number) for number in range(3)]
    prints = []
    for content in (records, [raw(3, image_class_label=0), *records[1:]], records):
        write(tmp_path / "train.tfrecord", content)
        prints.append(open_tfrecords(tmp_path).fingerprint)
    prints.append(open_tfrecords(tmp_path, size=8).fingerprint)
    assert prints[0] == prints[2]
    assert len(set(prints)) == 3


# --- What is damaged ---


def test_the_checksum_is_that_of_the_format() -> None:
    """Of nine bytes '123456789' Castagnoli's CRC is 0xE3069283 (RFC 3720)."""
    crc = 0xE3069283
    assert masked_crc32c(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@pytest.mark.parametrize(
    ("spoil", "record", "said"),
    [
        (lambda path: damage(path, 3, record=2), 2, "wrong checksum (CRC32C) of its length"),  # in the length
        (lambda path: damage(path, 9, record=2), 2, "wrong checksum (CRC32C) of its length"),  # in its checksum
        (lambda path: os.truncate(path, path.stat().st_size - 50), 3, "is cut off"),  # in the data
        (lambda path: os.truncate(path, record_offset(path.read_bytes(), 3) + 5), 3, "is cut off"),  # in the header
        (lambda path: os.truncate(path, path.stat().st_size - 1), 3, "is cut off"),  # in the data's checksum
    ],
)
def test_a_damaged_file_is_named_with_record_and_byte(
    folder: Path, spoil: Callable[[Path], None], record: int, said: str
) -> None:
    path = folder / "train-0.tfrecord"
    offset = record_offset(path.read_bytes(), record)
    spoil(path)
    with pytest.raises(DataError) as caught:
        open_tfrecords(folder)
    assert f"record {record} (at byte {offset:,}) of {path}" in str(caught.value)
    assert said in str(caught.value)
    assert (caught.value.exit_code, caught.value.reach) == (3, "node")


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "is empty"), (b"a text, not a record", "record 0 (at byte 0)"), (b"\0" * 100, "record 0 (at byte 0)")],
    ids=["empty", "text", "zeros"],
)
def test_a_file_of_something_else_is_named(folder: Path, content: bytes, said: str) -> None:
    (folder / "train-1.tfrecord").write_bytes(content)
    with pytest.raises(DataError) as caught:
        open_tfrecords(folder)
    assert str(folder / "train-1.tfrecord") in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize("place", [20, -2], ids=["data", "data's checksum"])
def test_a_damaged_record_is_named_and_the_others_are_read(folder: Path, place: int) -> None:
    path = folder / "train-0.tfrecord"
    offset = record_offset(path.read_bytes(), 2)
    end = record_offset(path.read_bytes(), 3)
    damage(path, place if place > 0 else end - offset + place, record=2)
    source = open_tfrecords(folder)
    assert source.num_samples == 12
    others = np.delete(ALL, 2)
    x, y = gather(source, others)
    np.testing.assert_array_equal(x, IMAGES[others])
    np.testing.assert_array_equal(y, LABELS[others])
    with pytest.raises(tf.errors.OpError, match="checksum"):
        gather(source, ALL)
    [sample] = find_unreadable(source, ALL)
    assert (sample.number, sample.location) == (2, f"record 2 (at byte {offset:,}) of {path}")
    assert sample.path == str(path)
    assert "checksum (CRC32C) of its data is wrong" in sample.reason
    assert source.damaged == (sample,)


def test_data_that_change_after_the_index_are_found(folder: Path) -> None:
    source = open_tfrecords(folder)
    damage(folder / "train-2.tfrecord", 40, record=1)  # sample 6
    assert unreadable_numbers(source) == [6]
    (folder / "train-0.tfrecord").write_bytes(b"")
    assert unreadable_numbers(source) == [0, 1, 2, 3, 6]


def test_an_undecodable_image_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    image = tf.io.encode_png(IMAGES[1]).numpy()
    write(tmp_path / "train.tfrecord", [encoded(0), encoded(1, image[:60]), encoded(2, b"no image"), encoded(3)])
    source = open_tfrecords(tmp_path)
    x, _ = gather(source, np.array([3, 0]))
    np.testing.assert_array_equal(x, IMAGES[[3, 0]])
    with pytest.raises(tf.errors.OpError):
        gather(source, np.arange(4))
    unreadable = find_unreadable(source, range(4))
    assert [sample.number for sample in unreadable] == [1, 2]
    assert all("cannot be decoded" in sample.reason for sample in unreadable)


# --- What does not fit ---


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([raw(0), raw(1, image_class_label=5)], r"record 1 .* has the label 5; with 3 classes labels must be 0 to 2"),
        ([raw(0), raw(1, image_class_label=-1)], r"record 1 .* has no label of 0 or above"),
        ([raw(0), raw(1)], r"no record of .* has the label 2 \('cow'\)"),
        ([raw(0), raw(1, image_height=6)], r"record 1 .* has 105 bytes in image/raw; .* must have 126"),
        ([raw(0), encoded(1), raw(2)], r"record 1 .*\(encoded\).*\(raw\); all must be encoded, or all raw"),
        ([make_example({"image/class/label": 1})], r"record 0 .* has neither image/encoded nor image/raw"),
        ([b"no message"], r"record 0 .* is no tf\.train\.Example"),
        ([raw(0), make_example({"image/class/label": b"1"})], r"record 1 .* is no tf\.train\.Example .*label"),
    ],
)  # fmt: skip
def test_records_that_do_not_fit_are_named_before_training(tmp_path: Path, records: list[bytes], said: str) -> None:
    write(tmp_path / "train.tfrecord", records)
    (tmp_path / "classes.txt").write_text("ape\nbee\ncow\n")
    with pytest.raises(DataError, match=said):
        open_tfrecords(tmp_path)


def test_a_huge_label_is_an_error_and_allocates_no_memory(tmp_path: Path) -> None:
    write(tmp_path / "train.tfrecord", [raw(0), raw(1), raw(2, image_class_label=2**62)])
    with pytest.raises(DataError, match=f"no record of .* has the label 2; each of the {2**62 + 1} classes"):
        open_tfrecords(tmp_path)


def test_channels_of_raw_images_are_not_converted(tmp_path: Path) -> None:
    write(tmp_path / "train.tfrecord", [raw(0)])
    with pytest.raises(DataError, match="must be with 1 channels"):
        load_tfrecords(tmp_path, image_size=5, channels=1)


def test_the_index_of_read_only_data_is_in_the_user_s_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    caches = [Path("/dev/null/index"), cache_directory("index") / "index"]
    paths = sorted(folder.glob("*.tfrecord"))
    index = tfrecord_index.load_index(paths, caches)
    assert caches[1].is_file()
    monkeypatch.setattr(tfrecord_index, "scan_file", None)  # the files are not read again
    np.testing.assert_array_equal(tfrecord_index.load_index(paths, caches).entries, index.entries)


def test_a_length_that_is_not_true_is_an_error_and_no_crash(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With the right checksum: TensorFlow's reader asks for so much memory, and the process dies."""
    for length in (100, 2**33, 2**40, 2**62, 2**64 - 8):
        path = write(tmp_path / f"{length}.tfrecord", [raw(0), raw(1)])
        head = struct.pack("<Q", length)
        with path.open("ab") as file:
            file.write(head + struct.pack("<I", masked_crc32c(head)) + b"abc" * 10)
    # In a process of its own, since it could end this one.
    script = f"""
from pathlib import Path
from ringtrain.data.formats.tfrecord_index import scan_file
from ringtrain.errors import DataError
for path in Path({str(tmp_path)!r}).iterdir():
    try:
        scan_file(path, 0)
    except DataError as error:
        print(error)
"""
    program = tmp_path_factory.mktemp("program") / "scan.py"
    program.write_text(script)
    env = clean_environment(PYTHONPATH=str(REPOSITORY))
    finished = run_command([sys.executable, str(program)], env=env, timeout=60)
    assert finished.rc == 0, finished.stderr
    assert len(re.findall(r"record 2 \(at byte .* is cut off", finished.stdout)) == 5, finished.stdout


@pytest.mark.parametrize("body", [b"", b"\0", b"\xff" * 8, struct.pack("<Q", 100_000) + b"[" * 100_000])
def test_an_index_without_a_header_is_rebuilt(folder: Path, tmp_path: Path, body: bytes) -> None:
    paths, cache = sorted(folder.glob("*.tfrecord")), tmp_path / "index"
    index = tfrecord_index.load_index(paths, [cache])
    cache.write_bytes(b"ringtfr1" + hashlib.sha256(body).digest() + body)
    np.testing.assert_array_equal(tfrecord_index.load_index(paths, [cache]).entries, index.entries)


@pytest.mark.parametrize("what", ["index", "train-0.tfrecord"])
def test_a_pipe_in_place_of_a_file_does_not_block(folder: Path, tmp_path: Path, what: str) -> None:
    paths, cache = sorted(folder.glob("*.tfrecord")), tmp_path / "index"
    (tmp_path / what).unlink(missing_ok=True)
    os.mkfifo(tmp_path / what)
    with pytest.raises(DataError, match="is no regular file") if what != "index" else contextlib.nullcontext():
        tfrecord_index.load_index(paths, [cache])
