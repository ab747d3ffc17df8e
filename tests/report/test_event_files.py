"""Images out of TensorBoard's event files."""

import base64
from pathlib import Path

import pytest

from ringtrain.report.event_files import choose_evenly, read_images


@pytest.fixture(scope="module")
def event_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tensorflow as tf

    directory = tmp_path_factory.mktemp("events")
    writer = tf.summary.create_file_writer(str(directory))
    with writer.as_default():
        for step in range(1, 21):
            tf.summary.scalar("train/loss", 1 / step, step=step)
            tf.summary.histogram("weights", tf.range(100.0), step=step)
            if step % 2 == 0:
                tf.summary.image("input | output", tf.fill([3, 4, 6, 1], step / 20), step=step)
    writer.close()
    [path] = directory.iterdir()
    return path


def pixel(address: str) -> int:
    import tensorflow as tf

    image = tf.io.decode_png(base64.b64decode(address.removeprefix("data:image/png;base64,")))
    assert image.shape == (4, 6, 1)
    return int(image[0, 0, 0])


def test_images_are_found_among_tensorboards_events(event_file: Path) -> None:
    [(name, shown)] = read_images([event_file]).items()
    assert name == "input | output"
    assert shown.num_steps == 10
    assert shown.steps == [2, 4, 8, 10, 12, 14, 18, 20]
    for step, images in zip(shown.steps, shown.images, strict=True):
        assert [pixel(address) for address in images] == [pytest.approx(step / 20 * 255, abs=1)] * 3


def test_a_cut_or_damaged_event_file_is_read_as_far_as_possible(event_file: Path, tmp_path: Path) -> None:
    whole = event_file.read_bytes()
    cut = tmp_path / "cut"
    for length in range(0, len(whole), 397):
        cut.write_bytes(whole[:length])
        read_images([cut])
    cut.write_bytes(whole[: len(whole) // 2])
    [shown] = read_images([cut]).values()
    assert 0 < shown.num_steps < 10
    damaged = bytearray(whole)
    damaged[::101] = b"\xff" * len(damaged[::101])
    cut.write_bytes(damaged)
    read_images([cut])


@pytest.mark.parametrize(
    ("number", "expected"), [(0, []), (1, [9]), (2, [0, 9]), (3, [0, 4, 9]), (20, list(range(10)))]
)
def test_the_first_and_the_last_are_among_the_chosen(number: int, expected: list[int]) -> None:
    assert choose_evenly(range(10), number) == expected
