"""CIFAR-10's files: they are read to the byte, damage is named, and one process of many downloads them."""

import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringtrain.data.formats import cifar10
from ringtrain.data.formats.cifar10 import ARCHIVE_NAME, FILES, FOLDER_NAME, RECORD_BYTES, Download, load_cifar10
from ringtrain.errors import DataError
from ringtrain.files import cache_directory


def make_contents(records_per_file: int = 3) -> dict[str, bytes]:
    """The six files with random pixels and labels."""
    generator = np.random.default_rng(0)
    records = generator.integers(0, 256, (len(FILES), records_per_file, RECORD_BYTES), np.uint8)
    records[:, :, 0] %= 10
    return {name: part.tobytes() for name, part in zip(FILES, records, strict=True)}


def write_folder(folder: Path, contents: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def make_archive(contents: dict[str, bytes], *, others: tuple[tarfile.TarInfo, ...] = ()) -> bytes:
    """An archive as the published one: the files in a directory, with two more beside them."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for member in others:
            archive.addfile(member)
        for name, content in {"readme.html": b"<p>", **contents, "batches.meta.txt": b"airplane\n"}.items():
            member = tarfile.TarInfo(f"{FOLDER_NAME}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def assert_holds(loaded: Any, contents: dict[str, bytes]) -> None:
    """What was loaded, laid out again as the files are, is their content."""
    (train_images, train_labels), (test_images, test_labels) = loaded
    images, labels = np.concatenate([train_images, test_images]), np.concatenate([train_labels, test_labels])
    pixels = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    records = np.concatenate([labels[:, np.newaxis].astype(np.uint8), pixels], axis=1)
    assert records.tobytes() == b"".join(contents.values())


# --- The files ---


def test_bytes_map_to_pixels_as_the_format_defines(tmp_path: Path) -> None:
    contents = {name: bytes([3]) + bytes(RECORD_BYTES - 1) for name in FILES}
    record = bytearray(contents["data_batch_2.bin"])
    record[0] = 9
    record[1 + 5] = 11  # red, row 0, column 5
    record[1 + 1024 + 32] = 22  # green, row 1, column 0
    record[1 + 2 * 1024 + 31 * 32 + 31] = 33  # blue, row 31, column 31
    write_folder(tmp_path, {**contents, "data_batch_2.bin": bytes(record)})
    (images, labels), (test_images, test_labels) = load_cifar10(tmp_path)
    assert images.shape == (5, 32, 32, 3)
    assert images.dtype == test_images.dtype == np.uint8
    assert labels.dtype == test_labels.dtype == np.int64
    assert labels.tolist() == [3, 9, 3, 3, 3]
    assert images[1, 0, 5].tolist() == [11, 0, 0]
    assert images[1, 1, 0].tolist() == [0, 22, 0]
    assert images[1, 31, 31].tolist() == [0, 0, 33]
    assert images.sum() == 66


@pytest.mark.parametrize("folder", [FOLDER_NAME, "."])
def test_files_are_found_in_their_folder_or_the_directory(tmp_path: Path, folder: str) -> None:
    contents = make_contents()
    write_folder(tmp_path / folder, contents)
    assert_holds(load_cifar10(tmp_path), contents)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda content: content[:-1], "has 9,218 bytes; it must have a whole number of records of 3,073 bytes"),
        (lambda content: content + b"x", "has 9,220 bytes"),
        (lambda content: b"", "has 0 bytes"),
        (lambda content: content[:RECORD_BYTES] + b"\x0a" + content[RECORD_BYTES + 1 :], "record 1 (at byte 3,073)"),
    ],
    ids=["truncated", "too long", "empty", "label 10"],
)
@pytest.mark.parametrize("name", ["data_batch_4.bin", "test_batch.bin"])
def test_damaged_files_are_named(tmp_path: Path, damage: Callable[[bytes], bytes], said: str, name: str) -> None:
    contents = make_contents()
    damaged = {**contents, name: damage(contents[name])}
    write_folder(tmp_path / FOLDER_NAME, damaged)
    with pytest.raises(DataError) as caught:
        load_cifar10(tmp_path)
    assert caught.value.exit_code == 3
    assert str(tmp_path / FOLDER_NAME / name) in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize("folder", [FOLDER_NAME, "."])
def test_a_missing_file_is_named(tmp_path: Path, folder: str) -> None:
    contents = make_contents()
    del contents["data_batch_3.bin"]
    write_folder(tmp_path / folder, contents)
    with pytest.raises(DataError, match=r"there is no file .*data_batch_3\.bin.*Put it there"):
        load_cifar10(tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, make_contents())
    (tmp_path / FILES[0]).unlink()
    (tmp_path / FILES[0]).mkdir()
    with pytest.raises(DataError, match=r"data_batch_1\.bin cannot be read: .* is no regular file"):
        load_cifar10(tmp_path)


# --- The archive ---


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [ARCHIVE_NAME, "data_batch_1.bin"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_special_files_do_not_block(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    make(tmp_path / name)
    with pytest.raises(DataError, match=f"{name} .*no regular file"):
        load_cifar10(tmp_path)


def test_a_file_that_is_too_large_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, make_contents())
    os.truncate(tmp_path / "data_batch_2.bin", 2**40)
    with pytest.raises(DataError, match=r"data_batch_2\.bin .*more than"):
        load_cifar10(tmp_path)


def test_the_archive_is_read_in_place(tmp_path: Path) -> None:
    contents = make_contents()
    (tmp_path / ARCHIVE_NAME).write_bytes(make_archive(contents))
    assert_holds(load_cifar10(tmp_path), contents)
    assert [path.name for path in tmp_path.iterdir()] == [ARCHIVE_NAME]


def test_members_with_other_names_or_kinds_are_left_alone(tmp_path: Path) -> None:
    link = tarfile.TarInfo(f"{FOLDER_NAME}/test_batch.bin")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    others = (link, tarfile.TarInfo(f"../{FOLDER_NAME}/test_batch.bin"), tarfile.TarInfo("/tmp/data_batch_1.bin"))
    contents = make_contents()
    (tmp_path / ARCHIVE_NAME).write_bytes(make_archive(contents, others=others))
    assert_holds(load_cifar10(tmp_path), contents)


def test_an_archive_with_a_link_for_a_file_lacks_it(tmp_path: Path) -> None:
    contents = make_contents()
    del contents["test_batch.bin"]
    link = tarfile.TarInfo(f"{FOLDER_NAME}/test_batch.bin")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    (tmp_path / ARCHIVE_NAME).write_bytes(make_archive(contents, others=(link,)))
    with pytest.raises(DataError, match=r"has no file cifar-10-batches-bin/test_batch\.bin"):
        load_cifar10(tmp_path)


@pytest.mark.parametrize("is_wanted", [True, False])
def test_an_archive_that_unpacks_to_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_wanted: bool
) -> None:
    """A member that is not wanted is unpacked too, to find the next."""
    monkeypatch.setattr(cifar10, "MAX_UNPACKED_BYTES", 2**24)
    name = f"{FOLDER_NAME}/{FILES[0] if is_wanted else 'other'}"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.size = 2**25
        archive.addfile(member, io.BytesIO(bytes(2**25)))
    (tmp_path / ARCHIVE_NAME).write_bytes(packed.getvalue())
    with pytest.raises(DataError, match="it unpacks to more than 16,777,216 bytes"):
        load_cifar10(tmp_path)


def test_a_long_name_in_an_archive_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar10, "MAX_UNPACKED_BYTES", 2**24)
    packed = io.BytesIO()
    with gzip.open(packed, "wb") as file:
        member = tarfile.TarInfo("././@LongLink")
        member.type = tarfile.GNUTYPE_LONGNAME
        member.size = 2**25
        file.write(member.tobuf(tarfile.GNU_FORMAT))
        file.write(b"a" * 2**25)
    (tmp_path / ARCHIVE_NAME).write_bytes(packed.getvalue())
    with pytest.raises(DataError, match="it unpacks to more than"):
        load_cifar10(tmp_path)


@pytest.mark.parametrize("seed", range(40))
def test_any_bytes_in_an_archive_are_read_or_named(tmp_path: Path, seed: int) -> None:
    generator = np.random.default_rng(seed)
    headers = bytearray(gzip.decompress(make_archive(make_contents())))
    for place in generator.integers(0, 512, 6):  # of the first header
        headers[place] = generator.integers(256)
    file = tmp_path / ARCHIVE_NAME
    file.write_bytes(gzip.compress(headers, 1))
    message = ""
    try:
        load_cifar10(tmp_path)
    except DataError as error:
        message = str(error)
    assert not message or str(file) in message


def flip_checksum(archive: bytes) -> bytes:
    return archive[:-8] + bytes([archive[-8] ^ 1]) + archive[-7:]


@pytest.mark.parametrize(
    "damage",
    [lambda archive: archive[:-30_000], lambda archive: b"", lambda archive: b"<html>not found</html>", flip_checksum,
     lambda archive: archive[:40_000] + b"damaged" + archive[40_007:], lambda archive: archive[:-8]],
    ids=["truncated", "empty", "no archive", "checksum", "bytes inside", "no checksum"],
)  # fmt: skip
def test_a_damaged_archive_is_named_and_not_downloaded_again(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    damaged = damage(make_archive(make_contents()))
    (tmp_path / ARCHIVE_NAME).write_bytes(damaged)
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz.*Remove it to have it downloaded") as caught:
        load_cifar10(tmp_path, download=Download(url="http://127.0.0.1:1/unused"))
    assert f"({len(damaged):,} bytes)" in str(caught.value)
    assert (tmp_path / ARCHIVE_NAME).read_bytes() == damaged


# --- The download ---


class Server(ThreadingHTTPServer):
    """Gives one file over loopback, and counts how often it was asked for."""

    daemon_threads = True

    def __init__(self, content: bytes, *, status: int = 200, length: int | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.status, self.length = content, status, len(content) if length is None else length
        self.num_requests = 0
        self.asked, self.answer = threading.Event(), threading.Event()
        self.answer.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{ARCHIVE_NAME}"

    def download(self, *, limit_s: float = 20) -> Download:
        return Download(self.url, hashlib.md5(self.content).hexdigest(), limit_s)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.num_requests += 1
        self.server.asked.set()
        self.server.answer.wait(30)
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(self.server.length))
        self.end_headers()
        self.wfile.write(self.server.content)

    def log_message(self, *args: object) -> None:
        del args


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    servers: list[Server] = []

    def start(content: bytes, **options: Any) -> Server:
        servers.append(Server(content, **options))
        threading.Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.answer.set()
        server.shutdown()
        server.server_close()


def test_missing_data_are_downloaded_once(tmp_path: Path, serve: Callable[..., Server]) -> None:
    contents = make_contents()
    server = serve(make_archive(contents))
    place = tmp_path / "not" / "there yet"
    for _ in range(2):
        assert_holds(load_cifar10(place, download=server.download()), contents)
    assert server.num_requests == 1
    assert {path.name for path in place.iterdir()} == {ARCHIVE_NAME, f".{ARCHIVE_NAME}.lock"}


def test_the_default_directory_is_the_user_s_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory("cifar10") == tmp_path / "ringtrain" / "cifar10"
    write_folder(cache_directory("cifar10"), make_contents())
    assert_holds(load_cifar10(None), make_contents())
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory("cifar10") == tmp_path / ".cache" / "ringtrain" / "cifar10"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"content": b"<html>a log-in page</html>"}, "gave 26 bytes with the MD5 .* but the published archive has"),
        ({"content": b"gone", "status": 404}, "HTTP Error 404"),
        ({"content": b"half", "length": 8}, "gave 4 bytes with the MD5"),
    ],
    ids=["another file", "not found", "cut short"],
)
def test_a_failed_download_leaves_no_file_and_gives_a_remedy(
    tmp_path: Path, serve: Callable[..., Server], options: dict[str, Any], said: str
) -> None:
    server = serve(**options)
    with pytest.raises(DataError, match=f"{said}.*store it there as {ARCHIVE_NAME}") as caught:
        load_cifar10(tmp_path, download=Download(url=server.url))
    assert str(tmp_path) in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [f".{ARCHIVE_NAME}.lock"]


def test_without_a_network_the_error_names_url_and_directory(tmp_path: Path, serve: Callable[..., Server]) -> None:
    server = serve(b"")
    server.shutdown()
    server.server_close()
    with pytest.raises(DataError, match=r"not in .* could not be downloaded: .*Connection refused.*Fetch http://"):
        load_cifar10(tmp_path, download=Download(url=server.url))


def test_a_silent_server_times_out(tmp_path: Path, serve: Callable[..., Server]) -> None:
    server = serve(b"")
    server.answer.clear()
    with pytest.raises(DataError, match="timed out"):
        load_cifar10(tmp_path, download=server.download(limit_s=0.2))


LOAD = """
import pathlib, sys
from ringtrain.data.formats.cifar10 import Download, load_cifar10
from ringtrain.errors import DataError
place, url, md5 = sys.argv[1:]
print("started", flush=True)
try:
    print(len(load_cifar10(pathlib.Path(place), download=Download(url, md5, 20))[0][0]))
except DataError as error:
    print(error)
"""


def start_loading(place: Path, download: Download) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LOAD, str(place), download.url, download.md5]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for_start(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"


@pytest.mark.parametrize("status", [200, 503])
def test_two_processes_that_start_at_once_download_once(
    tmp_path: Path, serve: Callable[..., Server], status: int
) -> None:
    server = serve(make_archive(make_contents()), status=status)
    server.answer.clear()  # until both are there
    processes = [start_loading(tmp_path, server.download()) for _ in range(2)]
    for process in processes:
        wait_for_start(process)
    assert server.asked.wait(20)
    with pytest.raises(subprocess.TimeoutExpired):  # the second waits
        processes[0].wait(0.5)
    server.answer.set()
    first, second = (process.communicate(timeout=20)[0] for process in processes)
    assert first == second
    assert first == "15\n" if status == 200 else "HTTP Error 503" in first
    assert server.num_requests == 1


def test_waiting_too_long_for_the_lock_is_an_error(tmp_path: Path, serve: Callable[..., Server]) -> None:
    server = serve(make_archive(make_contents()))
    server.answer.clear()
    process = start_loading(tmp_path, server.download())
    assert server.asked.wait(20)
    with pytest.raises(DataError, match=r"another process has held .*\.lock for more than 0\.1 s"):
        load_cifar10(tmp_path, download=server.download(limit_s=0.1))
    process.kill()
    process.communicate()
    server.answer.set()  # a killed process leaves the lock free, and a part which does no harm
    assert_holds(load_cifar10(tmp_path, download=server.download()), make_contents())
