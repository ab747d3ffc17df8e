"""Image folders: what they hold is read exactly, and what is wrong with them is named before the training."""

import io
import os
import re
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ringtrain.data.formats import image_folder
from ringtrain.data.formats.image_folder import ImageFolderSource, load_image_folder, resize_middle
from ringtrain.data.formats.image_header import HeaderError, ImageHeader, read_header
from ringtrain.data.unreadable import find_unreadable
from ringtrain.errors import DataError
from tests.unit.images import in_pipeline


def make_image(height: int = 6, width: int = 6, channels: int = 3, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


def encode(image: np.ndarray, kind: str, **options: Any) -> bytes:
    return (tf.io.encode_png if kind == "png" else tf.io.encode_jpeg)(image, **options).numpy()


def write(path: Path, image: np.ndarray | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(image if isinstance(image, bytes) else encode(image, path.suffix.lower().lstrip(".")))


IMAGES = {
    "train/cat/a.png": make_image(seed=1),
    "train/cat/b.PNG": make_image(seed=2),
    "train/ant/c.png": make_image(seed=3),
    "val/cat/d.png": make_image(seed=4),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, image in IMAGES.items():
        write(tmp_path / name, image)
    write(tmp_path / "train/cat/.hidden", b"no image")
    write(tmp_path / ".cache/x", b"")
    return tmp_path


def load(folder: Path, image_size: int | None = None) -> tuple[ImageFolderSource, ImageFolderSource | None]:
    return load_image_folder(folder, image_size=image_size, channels=3)


def gather_in_pipeline(source: ImageFolderSource, indices: list[int]) -> tuple[Any, ...]:
    return tuple(in_pipeline(source.gather, indices))


# --- What is read ---


def test_classes_and_images_come_in_the_order_of_their_names(folder: Path) -> None:
    train, evaluation = load(folder)
    assert train.class_names == ("ant", "cat")
    assert train.image_shape == (6, 6, 3)
    assert (train.num_samples, train.damaged) == (3, ())
    images, labels = gather_in_pipeline(train, [0, 1, 2])
    assert (images.dtype, labels.dtype) == (np.uint8, np.int64)
    np.testing.assert_array_equal(images, [IMAGES[f"train/{name}"] for name in ("ant/c.png", "cat/a.png", "cat/b.PNG")])
    assert labels.tolist() == [0, 1, 1]
    assert evaluation is not None
    images, labels = gather_in_pipeline(evaluation, [0])
    np.testing.assert_array_equal(images, [IMAGES["val/cat/d.png"]])
    assert labels.tolist() == [1]  # of the training's classes, though the evaluation has one alone
    assert evaluation.class_names == train.class_names


def test_samples_come_in_the_order_that_was_asked_for(folder: Path) -> None:
    train, _ = load(folder)
    images, labels = gather_in_pipeline(train, [2, 0, 2])
    np.testing.assert_array_equal(images, [IMAGES[f"train/{n}"] for n in ("cat/b.PNG", "ant/c.png", "cat/b.PNG")])
    assert labels.tolist() == [1, 0, 1]


def test_an_eager_gather_equals_a_pipeline_s_without_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    train, _ = load(folder)
    tf.get_logger().addHandler(caplog.handler)
    try:
        eager = train.gather(tf.constant([2, 0], tf.int64))
    finally:
        tf.get_logger().removeHandler(caplog.handler)
    assert caplog.messages == []
    for ours, pipelines in zip(eager, gather_in_pipeline(train, [2, 0]), strict=True):
        np.testing.assert_array_equal(ours, pipelines)


def test_no_sample_is_an_empty_batch(folder: Path) -> None:
    train, _ = load(folder)
    images, labels = gather_in_pipeline(train, [])
    assert images.shape == (0, 6, 6, 3)
    assert labels.shape == (0,)
    assert train.gather(tf.zeros([0], tf.int64))[0].shape[1:] == (6, 6, 3)


def test_the_first_evaluation_folder_is_used_and_is_optional(tmp_path: Path) -> None:
    write(tmp_path / "train/a/1.png", make_image())
    assert load(tmp_path)[1] is None
    for count, name in enumerate(("test", "val", "validation"), start=1):
        for number in range(count):
            write(tmp_path / name / f"a/{number}.png", make_image())
        evaluation = load(tmp_path)[1]
        assert evaluation is not None
        assert evaluation.num_samples == count


def test_a_jpeg_is_decoded_with_the_accurate_transform(tmp_path: Path) -> None:
    smooth = tf.cast(tf.image.resize(make_image(4, 4), (40, 48)), tf.uint8).numpy()
    write(tmp_path / "train/a/1.JPeG", encode(smooth, "jpeg"))
    write(tmp_path / "train/a/2.jpg", encode(smooth, "jpeg"))
    [first, second], _ = load(tmp_path)[0].gather(tf.constant([0, 1], tf.int64))
    expected = tf.io.decode_jpeg(encode(smooth, "jpeg"), dct_method="INTEGER_ACCURATE")
    np.testing.assert_array_equal(first, expected)
    np.testing.assert_array_equal(second, expected)


def test_images_of_any_size_and_channels_are_brought_to_one_form(tmp_path: Path) -> None:
    image, grey = make_image(30, 20), make_image(9, 12, 1)
    write(tmp_path / "train/a/1.png", image)
    write(tmp_path / "train/a/2.png", grey)
    write(tmp_path / "train/a/3.png", make_image(8, 8, 4))
    source, _ = load(tmp_path, image_size=8)
    images, _ = gather_in_pipeline(source, [0, 1, 2])
    assert images.shape == (3, 8, 8, 3)
    middle = tf.image.resize(image[5:25], (8, 8), antialias=True)
    np.testing.assert_array_equal(images[0], np.round(middle).astype(np.uint8))
    middle = tf.image.resize(np.repeat(grey[:, 1:10], 3, axis=2), (8, 8), antialias=True)
    np.testing.assert_array_equal(images[1], np.round(middle).astype(np.uint8))
    np.testing.assert_array_equal(images[2], make_image(8, 8, 4)[..., :3])
    grey_source, _ = load_image_folder(tmp_path, image_size=8, channels=1)
    assert gather_in_pipeline(grey_source, [0, 1])[0].shape == (2, 8, 8, 1)


def test_an_image_that_has_the_size_already_is_not_changed() -> None:
    image = make_image(7, 7)
    np.testing.assert_array_equal(resize_middle(image, 7), image)


def test_the_fingerprint_covers_names_and_sizes_not_the_path(folder: Path, tmp_path: Path) -> None:
    def fingerprints() -> tuple[str, str]:
        train, evaluation = load(folder, image_size=8)
        assert evaluation is not None
        return train.fingerprint, evaluation.fingerprint

    first = fingerprints()
    assert len(set(first)) == 2
    folder = folder.rename(tmp_path.parent / "elsewhere")
    assert fingerprints() == first
    (folder / "train/cat/a.png").rename(folder / "train/cat/aa.png")
    renamed = fingerprints()
    assert renamed[0] != first[0]
    assert renamed[1] == first[1]
    with (folder / "train/cat/aa.png").open("ab") as file:
        file.write(b"\0")
    assert fingerprints()[0] not in (first[0], renamed[0])


# --- What is wrong with a folder ---


def remove_classes(part: Path) -> None:
    for folder in part.iterdir():
        shutil.rmtree(folder)


def write_all(folder: Path, names: list[str]) -> None:
    for name in names:
        write(folder / name, b"x")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda folder: (folder / "train").rename(folder / "training"),
            r"the folder .*/train does not exist;.*--data_dir",
        ),
        (lambda folder: remove_classes(folder / "train"), r"/train holds no class"),
        (lambda folder: (folder / "train/empty").mkdir(), r"/train/empty holds no image; .*remove the folder"),
        (lambda folder: write(folder / "train/hidden/.a.png", make_image()), r"/train/hidden holds no image"),
        (lambda folder: (folder / "val/ant").mkdir(), r"/val/ant holds no image"),
        (lambda folder: write(folder / "train/cat/x.gif", b"x"), r"/train/cat holds 'x\.gif'; .*\.jpg, \.jpeg, \.png"),
        (lambda folder: write_all(folder / "train/cat", ["x.txt", "y.txt", "z.md"]), "holds 3 such things as 'x.txt'"),
        (lambda folder: write(folder / "train/cat/more/x.png", make_image()), "/train/cat holds 'more'"),
        (lambda folder: (folder / "train/cat/y.png").mkdir(), r"/train/cat holds 'y\.png'"),
        (lambda folder: write(folder / "train/labels.csv", b"x"), r"/train holds 'labels\.csv' in addition to the"),
        (lambda folder: write(folder / "val/dog/x.png", make_image()), r"/val holds the class 'dog', which train/"),
    ],
    ids=["no train", "no class", "empty class", "hidden alone", "empty evaluation class", "another ending",
         "several other endings", "a folder in a class", "a folder named as an image", "beside the classes",
         "an unknown class"],
)  # fmt: skip
@pytest.mark.parametrize("image_size", [None, 8])
def test_a_wrong_folder_is_named(
    folder: Path, damage: Callable[[Path], Any], said: str, image_size: int | None
) -> None:
    damage(folder)
    with pytest.raises(DataError, match=said) as caught:
        load(folder, image_size)
    assert (caught.value.exit_code, caught.value.reach) == (3, "node")
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("image_size", [None, 8])
def test_an_unreadable_file_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, image_size: int | None) -> None:
    access = os.access  # patched, since root may read anything
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("b.PNG") and access(path, mode))
    with pytest.raises(DataError, match=r"/train/cat/b\.PNG cannot be read\. Check the file and its permissions"):
        load(folder, image_size)


def test_an_unreadable_folder_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refuse(path: Path) -> Any:
        if path.name == "ant":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match="/train/ant cannot be read: Permission denied"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "image", "said"),
    [
        ("train/cat/x.png", make_image(6, 7), r"/train/cat/x\.png is 6x7 with 3 channels, and the first, .*/train/ant/"
         r"c\.png, is 6x6 with 3 channels; all must have one size and 3 channels.*--options\.image_size"),
        ("val/cat/x.jpg", make_image(5, 6), r"/val/cat/x\.jpg is 5x6 with 3 channels"),
        ("train/cat/x.jpg", make_image(6, 6, 1), r"/train/cat/x\.jpg is 6x6 with 1 channel, and"),
        ("train/cat/x.png", make_image(6, 6, 4), r"/train/cat/x\.png is 6x6 with 4 channels, and"),
        ("train/a/x.png", make_image(6, 6, 1), r"/train/a/x\.png is 6x6 with 1 channel; all must"),
    ],
    ids=["size", "size in the evaluation", "grey", "transparent", "first of all"],
)  # fmt: skip
def test_an_image_of_another_form_is_named(folder: Path, name: str, image: np.ndarray, said: str) -> None:
    write(folder / name, image)
    with pytest.raises(DataError, match=said):
        load(folder)
    load(folder, image_size=8)


# --- Images that cannot be decoded ---


def damage_images(folder: Path) -> None:
    """In train, of 5: sample 0 is cut in its pixels, 1 is whole, 2 is whole, 3 has no content, 4 is no image."""
    image = encode(make_image(seed=3), "png")
    write(folder / "train/ant/c.png", image[: len(image) // 2])
    write(folder / "train/cat/x.jpg", b"")
    write(folder / "train/cat/y.jpg", b"<html>")


@pytest.mark.parametrize("image_size", [None, 8])
def test_bad_images_are_found_and_named(folder: Path, image_size: int | None) -> None:
    damage_images(folder)
    train, _ = load(folder, image_size)
    with pytest.raises(tf.errors.InvalidArgumentError):
        gather_in_pipeline(train, [1, 0])
    found = find_unreadable(train, [4, 1, 0, 2, 3])
    assert [(sample.number, sample.location, sample.path) for sample in found] == [
        (number, str(folder / name), str(folder / name))
        for number, name in ((4, "train/cat/y.jpg"), (0, "train/ant/c.png"), (3, "train/cat/x.jpg"))
    ]
    assert all(re.fullmatch(r"[A-Z][^{}\[\]]+", sample.reason) for sample in found), found
    assert find_unreadable(train, [1, 2]) == []


def test_damage_visible_in_headers_is_found_before_training(folder: Path) -> None:
    damage_images(folder)
    train, evaluation = load(folder)
    assert [(sample.number, sample.path, sample.reason) for sample in train.damaged] == [
        (3, str(folder / "train/cat/x.jpg"), "an empty file"),
        (4, str(folder / "train/cat/y.jpg"), "neither a JPEG nor a PNG image: it begins with b'<html>'"),
    ]
    assert evaluation is not None
    assert evaluation.damaged == ()


def test_no_image_among_the_files_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "train/a/1.jpg", b"")
    with pytest.raises(DataError, match=r"no file in .* is an image\. The first, .*/train/a/1\.jpg: an empty file"):
        load(tmp_path)


@pytest.mark.parametrize("change", ["removed", "of another size"])
def test_a_file_that_changed_since_is_a_bad_sample(folder: Path, change: str) -> None:
    train, _ = load(folder)
    path = folder / "train/cat/a.png"
    path.unlink() if change == "removed" else write(path, make_image(9, 9))
    with pytest.raises(tf.errors.OpError):
        gather_in_pipeline(train, [0, 1])
    assert [sample.number for sample in find_unreadable(train, [0, 1, 2])] == [1]


# --- Headers ---


def with_segment(jpeg: bytes, length: int) -> bytes:
    """A JPEG with an EXIF segment of this many bytes, which holds what could pass for a frame header."""
    content = (b"Exif\0\0" + b"\xff\xc0\x00\x11\x08\x00\x01\x00\x01\x03" * length)[: length - 2]
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", length) + content + jpeg[2:]


def with_tables_first(jpeg: bytes) -> bytes:
    """A JPEG with its first Huffman table once more, before the frame header."""
    start = jpeg.index(b"\xff\xc4")
    (length,) = struct.unpack(">H", jpeg[start + 2 : start + 4])
    return jpeg[:20] + jpeg[start : start + 2 + length] + jpeg[20:]


def png_of(colour: int, *chunks: bytes, depth: int = 8) -> bytes:
    """A PNG image of 3x2 pixels, put together by hand."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    values = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    rows = (b"\0" + bytes(2 * values * depth // 8)) * 3  # no filter
    header = struct.pack(">IIBBBBB", 2, 3, depth, colour, 0, 0, 0)
    parts = [(part[:4], part[4:]) for part in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        chunk(kind, content)
        for kind, content in [(b"IHDR", header), *parts, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    )


SMOOTH = tf.cast(tf.image.resize(make_image(3, 3), (37, 53)), tf.uint8).numpy()
JPEG = encode(SMOOTH, "jpeg")
ENCODED = {
    "baseline": JPEG,
    "progressive": encode(SMOOTH, "jpeg", format="rgb", progressive=True),
    "grey": encode(SMOOTH[..., :1], "jpeg", format="grayscale"),
    "grey progressive": encode(SMOOTH[..., :1], "jpeg", format="grayscale", progressive=True),
    "full colour": encode(SMOOTH, "jpeg", chroma_downsampling=False, quality=100),
    "metadata": encode(SMOOTH, "jpeg", xmp_metadata="x" * 30_000),
    "long EXIF": with_segment(JPEG, 65_535),
    "two long EXIFs": with_segment(with_segment(JPEG, 65_535), 40_000),
    "tables first": with_tables_first(JPEG),
    "fill bytes": JPEG[:2] + b"\xff" * 5 + JPEG[2:],
    "bytes between segments": JPEG[:20] + b"\0\1\xff\0" + JPEG[20:],
    "PNG grey": encode(SMOOTH[..., :1], "png"),
    "PNG grey, transparent": encode(SMOOTH[..., :2], "png"),
    "PNG colour": encode(SMOOTH, "png"),
    "PNG colour, transparent": encode(np.concatenate([SMOOTH, SMOOTH[..., :1]], axis=2), "png"),
    "PNG 16 bits": encode(SMOOTH.astype(np.uint16), "png"),
    "PNG palette": png_of(3, b"PLTE" + bytes(6)),
    "PNG palette, transparent": png_of(3, b"gAMA" + bytes([0, 0, 177, 143]), b"PLTE" + bytes(6), b"tRNS" + bytes(2)),
    "PNG grey, one colour transparent": png_of(0, b"tRNS" + bytes(2)),
    "PNG one pixel high": encode(SMOOTH[:1], "png"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENCODED)
def test_the_header_gives_the_shape_of_the_decoded_image(name: str) -> None:
    decoded = tf.io.decode_image(ENCODED[name], channels=0)
    assert read_header(io.BytesIO(ENCODED[name])) == tuple(decoded.shape)


def test_a_header_is_read_without_the_pixels_and_the_metadata() -> None:
    class Counted(io.BytesIO):
        count = 0

        def read(self, size: int | None = -1) -> bytes:
            data = super().read(size)
            self.count += len(data)
            return data

    file = Counted(ENCODED["two long EXIFs"])
    assert read_header(file) == ImageHeader(37, 53, 3)
    assert file.count < 200


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "an empty file"),
        (b"GIF89a....", "neither a JPEG nor a PNG image: it begins with b'GIF89a"),
        (JPEG[:30], "it ends within its header"),
        (ENCODED["long EXIF"][:5_000], "it ends within its header"),
        (ENCODED["PNG colour"][:20], "it ends within its header"),
        (b"\xff\xd8\xff\xd9", "it ends, without a frame header"),
        (b"\xff\xd8\xff\xe0\0\1", "a segment of 1 bytes"),
        (png_of(2)[:12] + b"XXXX" + png_of(2)[16:], "its first chunk is b'XXXX'"),
        (png_of(2)[:16] + bytes(4) + png_of(2)[20:], "its header says 3x0"),
    ],
    ids=["empty", "GIF", "cut", "cut in EXIF", "cut PNG", "no frame", "segment", "no IHDR", "no width"],
)
def test_a_missing_header_is_an_error(content: bytes, said: str) -> None:
    with pytest.raises(HeaderError, match=said):
        read_header(io.BytesIO(content))


def test_more_images_than_one_task_reads_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_folder, "_HEADERS_PER_TASK", 2)
    for number in range(5):
        write(tmp_path / f"train/a/{number}.png", make_image() if number != 3 else b"")
    train, _ = load(tmp_path)
    assert [(sample.number, sample.path) for sample in train.damaged] == [(3, str(tmp_path / "train/a/3.png"))]
