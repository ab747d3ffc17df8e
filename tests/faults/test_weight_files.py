"""Weights that ringtrain did not write: exit code 3 with the file and the reason, whatever a file holds."""

from __future__ import annotations

import contextlib
import io
import json
import re
import resource
import shutil
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtrain.errors import DataError, UsageError
from ringtrain.run.checkpoint import Checkpoint, write_files
from ringtrain.run.variables import name_variables, named_weights
from ringtrain.training import weight_files
from ringtrain.training.weights import take_weights
from tests.faults.test_foreign_files import change_at, read_content, sign
from tests.faults.test_fuzz import slowly

MAX_SECONDS = 5.0
MAX_EXTRA_BYTES = 2**29
WIDTH = 6


@pytest.fixture(scope="module")
def job() -> Any:
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(WIDTH, name="head")(inputs))
    step = SimpleNamespace(
        model=model,
        named_variables=name_variables(weights=named_weights(model)),
        averages=SimpleNamespace(pairs=[]),
        optimizer=keras.optimizers.SGD(),
    )
    return SimpleNamespace(step=step)


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    """A file of this module cannot make the process much larger: the reader gets MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    former, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + MAX_EXTRA_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (former, hard))


# --- Files whose layer ``head`` is right but for one thing ---


def write_h5(file: Any, kernel: Callable[[h5py.Group], Any]) -> None:
    """Write the layer ``head``, with the kernel that a function creates in its group of variables."""
    with h5py.File(file, "w") as opened:
        opened.create_group("vars")
        variables = opened.create_group("layers/dense/vars")
        variables.attrs["name"] = "head"
        kernel(variables)
        variables["1"] = np.zeros(WIDTH, "float32")


def create(*words: Any, **more: Any) -> Callable[[h5py.Group], Any]:
    return lambda group: group.create_dataset("0", *words, **more)


def rename_layer(name: Any) -> Callable[[h5py.Group], Any]:
    def write(group: h5py.Group) -> None:
        group.attrs["name"] = name
        group["0"] = np.zeros((4, WIDTH), "float32")

    return write


def store_chunk(data: bytes, *, skipped_filters: int = 0) -> Callable[[h5py.Group], Any]:
    """A kernel in one compressed chunk of these bytes."""

    def write(group: h5py.Group) -> None:
        dataset = group.create_dataset("0", (4, WIDTH), "float32", chunks=(4, WIDTH), compression="gzip")
        dataset.id.write_direct_chunk((0, 0), data, skipped_filters)

    return write


def bomb(num_bytes: int) -> bytes:
    packer = zlib.compressobj(9)
    block = bytes(2**20)
    return b"".join(packer.compress(block) for _ in range(num_bytes // 2**20)) + packer.flush()


KERNELS: dict[str, Callable[[h5py.Group], Any]] = {
    "compound": create((4, WIDTH), np.dtype([("a", "f4"), ("b", "f4")])),
    "array type": create((4,), np.dtype(("f4", (WIDTH,)))),
    "no values": lambda group: group.create_dataset("0", data=h5py.Empty("f4")),
    "texts": create((4, WIDTH), h5py.string_dtype()),
    "long texts": create((4, WIDTH), "S1000000"),
    "bytes": create((4, WIDTH), "V16"),
    "references": create((4, WIDTH), h5py.ref_dtype),
    "lists of any length": create((4, WIDTH), h5py.vlen_dtype("f4")),
    "complex": create((4, WIDTH), "complex64"),
    "a layer named by a number": rename_layer(7),
    "a layer named by a list": rename_layer([1.0, 2.0]),
    "a layer named by nothing": rename_layer(h5py.Empty("S4")),
    "a layer named by bytes": rename_layer(np.void(b"head")),
    "larger chunks than values": create((4, WIDTH), "f4", chunks=(2**14, 2**13), maxshape=(None, None)),
    "lzf": create((4, WIDTH), "f4", compression="lzf"),
    "scale-offset": create((4, WIDTH), "f4", scaleoffset=2),
    "a chunk that is not compressed": store_chunk(b"no such format"),
    "a chunk that unpacks to more": store_chunk(bomb(2**25)),
    "a chunk that unpacks to less": store_chunk(bomb(0)),
    "a short chunk": store_chunk(b"abc", skipped_filters=1),
}


def fails(job: Any, file: Path, reason: str) -> None:
    """Take weights from a file that cannot be used: a DataError, soon, of this file and reason."""
    begin = time.process_time()
    with pytest.raises(DataError, match=re.escape(f"init_from {str(file)!r}")) as caught:
        take_weights(job, file)
    assert time.process_time() - begin < MAX_SECONDS
    assert re.search(reason, str(caught.value)), caught.value
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("suffix", [".weights.h5", ".keras"])
def test_a_kernel_that_is_no_array_of_numbers_is_named(
    kind: str, suffix: str, job: Any, tmp_path: Path, bounded_memory: None
) -> None:
    file = tmp_path / f"a{suffix}"
    content = io.BytesIO()
    write_h5(content, KERNELS[kind])
    if suffix == ".keras":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("model.weights.h5", content.getvalue())
    else:
        file.write_bytes(content.getvalue())
    fails(job, file, "layers/dense|variable head/kernel|decompress")


@pytest.mark.parametrize("filters", [{}, {"compression": "gzip", "shuffle": True}, {"fletcher32": True, "chunks": True},
                                     {"compression": "gzip", "fletcher32": True, "chunks": (2, 4)}])  # fmt: skip
def test_compressed_numbers_are_read(filters: dict[str, Any], job: Any, tmp_path: Path) -> None:
    kernel = np.random.default_rng(0).normal(size=(4, WIDTH)).astype("float32")
    write_h5(tmp_path / "a.weights.h5", create(data=kernel, **filters))
    assert take_weights(job, tmp_path / "a.weights.h5")[0].endswith("2 of 2 variables taken")
    np.testing.assert_array_equal(job.step.named_variables["weights/head/kernel"].numpy(), kernel)


@pytest.mark.parametrize("chunks", [None, True, (1024, 1024)])
def test_terabytes_of_another_shape_are_not_read(chunks: Any, job: Any, tmp_path: Path, bounded_memory: None) -> None:
    write_h5(tmp_path / "a.weights.h5", create((2**20, 2**18), "f4", chunks=chunks))
    begin = time.process_time()
    lines = take_weights(job, tmp_path / "a.weights.h5")
    assert lines[1] == f"  new: head/kernel [4, {WIDTH}], of shape [1048576, 262144] there"
    assert time.process_time() - begin < MAX_SECONDS


def test_values_in_other_files_are_not_read(job: Any, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "secret.h5", "w") as other:
        other["x"] = np.ones((4, WIDTH), "float32")
    layout = h5py.VirtualLayout((4, WIDTH), "float32")
    layout[:] = h5py.VirtualSource(tmp_path / "secret.h5", "x", (4, WIDTH))
    write_h5(tmp_path / "a.weights.h5", lambda group: group.create_virtual_dataset("0", layout))
    assert f"  new: head/kernel [4, {WIDTH}], not there" in take_weights(job, tmp_path / "a.weights.h5")


# --- Archives ---


def archive_of(tmp_path: Path, *, size: int = 0, **more: Any) -> Path:
    """A .keras file whose member holds a kernel of ones, followed by ``size`` zeros."""
    content = io.BytesIO()
    write_h5(content, create(data=np.ones((4, WIDTH), "float32")))
    file = tmp_path / "a.keras"
    with zipfile.ZipFile(file, "w", **more) as archive:
        archive.writestr("config.json", "{}")
        with archive.open("model.weights.h5", "w", force_zip64=True) as member:
            member.write(content.getvalue())
            for _ in range(size // 2**20):
                member.write(bytes(2**20))
    return file


def set_bytes(file: Path, signature: bytes, offset: int, value: bytes) -> None:
    """Replace bytes of the last header of a kind in an archive."""
    data = bytearray(file.read_bytes())
    start = data.rindex(signature) + offset
    data[start : start + len(value)] = value
    file.write_bytes(data)


def test_an_archive_that_promises_much_is_not_unpacked(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = archive_of(tmp_path, size=2**30, compression=zipfile.ZIP_DEFLATED)
    assert file.stat().st_size < 2**21
    monkeypatch.setattr(shutil, "copyfileobj", lambda *files: pytest.fail("it is unpacked"))
    fails(job, file, r"model.weights.h5 unpacks to 1,073,7\d\d,\d\d\d bytes, and at most 67,108,864 are unpacked")


def test_an_archive_may_be_compressed(job: Any, tmp_path: Path) -> None:
    file = archive_of(tmp_path, compression=zipfile.ZIP_DEFLATED)
    assert take_weights(job, file)[0].endswith("2 of 2 variables taken")


def test_an_archive_that_holds_more_than_it_promises_is_damaged(job: Any, tmp_path: Path) -> None:
    """The reader stops at the promised size."""
    file = archive_of(tmp_path, size=2**28, compression=zipfile.ZIP_DEFLATED)
    directory = b"PK\x01\x02"
    data = bytearray(file.read_bytes())
    start = data.rindex(directory)
    data[start + 24 : start + 28] = (4096).to_bytes(4, "little")
    file.write_bytes(data)
    fails(job, file, "Bad CRC-32|Truncated|synchronously open")


@pytest.mark.parametrize(
    ("method", "reason"), [(zipfile.ZIP_BZIP2, "compressed by method 12"), (zipfile.ZIP_LZMA, "by method 14")]
)
def test_other_compressions_are_refused(method: int, reason: str, job: Any, tmp_path: Path) -> None:
    fails(job, archive_of(tmp_path, compression=method), reason)


def test_an_encrypted_member_is_named(job: Any, tmp_path: Path) -> None:
    file = archive_of(tmp_path)
    set_bytes(file, b"PK\x01\x02", 8, b"\x01")
    fails(job, file, "model.weights.h5 is encrypted")


def test_an_archive_without_weights_is_named(job: Any, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.keras", "w") as archive:
        archive.writestr("config.json", "{}")
    fails(job, tmp_path / "a.keras", "model.weights.h5")


# --- safetensors ---


def safetensors_of(header: Any, values: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + values


def tensor(**changes: Any) -> Any:
    return {"head/kernel": {"dtype": "F32", "shape": [4, WIDTH], "data_offsets": [0, 96]} | changes}


FOREIGN_TENSORS = {
    "empty": b"",
    "header of terabytes": (2**42).to_bytes(8, "little") + b"{}",
    "no JSON": safetensors_of(b"no such format"),
    "deep JSON": safetensors_of(b"[" * 100_000),
    "no object": safetensors_of([1]),
    "a number": safetensors_of({"head/kernel": 7}),
    "no type": safetensors_of({"head/kernel": {"shape": [4, WIDTH], "data_offsets": [0, 96]}}, bytes(96)),
    "unknown type": safetensors_of(tensor(dtype="F4"), bytes(96)),
    "a type that is a list": safetensors_of(tensor(dtype=["F32"]), bytes(96)),
    "a shape that is a number": safetensors_of(tensor(shape=24), bytes(96)),
    "a shape of texts": safetensors_of(tensor(shape=["4", "6"]), bytes(96)),
    "negative sizes": safetensors_of(tensor(shape=[-4, -WIDTH]), bytes(96)),
    "terabytes": safetensors_of(tensor(shape=[2**40, 4], data_offsets=[0, 2**44]), bytes(96)),
    "bytes beyond the end": safetensors_of(tensor(data_offsets=[8, 104]), bytes(96)),
    "negative offset": safetensors_of(tensor(data_offsets=[-96, 0]), bytes(96)),
    "one offset": safetensors_of(tensor(data_offsets=[0]), bytes(96)),
    "fractions": safetensors_of(tensor(data_offsets=[0.5, 96.5]), bytes(96)),
    "fewer bytes than values": safetensors_of(tensor(data_offsets=[0, 90]), bytes(96)),
}


@pytest.mark.parametrize("kind", FOREIGN_TENSORS)
def test_a_damaged_file_of_safetensors_is_named(kind: str, job: Any, tmp_path: Path, bounded_memory: None) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(FOREIGN_TENSORS[kind])
    fails(job, file, "cannot be read: .*header|JSON|nested|tensor")


@pytest.mark.parametrize(("name", "dtype"), weight_files.SAFETENSORS_TYPES.items())
def test_each_type_of_safetensors_is_read(name: str, dtype: Any, job: Any, tmp_path: Path) -> None:
    kernel = np.arange(4 * WIDTH).reshape(4, WIDTH).astype(dtype)
    item = {"dtype": name, "shape": [4, WIDTH], "data_offsets": [3, 3 + kernel.nbytes]}
    header = {"__metadata__": {"format": "np"}, "head/kernel": item}
    (tmp_path / "a.safetensors").write_bytes(safetensors_of(header, b"abc" + kernel.tobytes()))
    assert take_weights(job, tmp_path / "a.safetensors")[0].endswith("1 of 2 variables taken")
    taken = job.step.named_variables["weights/head/kernel"].numpy()
    np.testing.assert_array_equal(taken, kernel.astype("float32"))


# --- Checkpoints ---


@pytest.mark.parametrize(
    ("key", "value"),
    [("name", 7), ("name", None), ("name", ["a"]), ("dtype", "S4"), ("dtype", "object"), ("dtype", "V4"),
     ("dtype", "datetime64[s]"), ("dtype", "(2,)i2"), ("dtype", "U1"), ("dtype", 4), ("shape", "24"), ("shape", [7])],
)  # fmt: skip
def test_a_checkpoint_of_foreign_variables_is_named(key: str, value: Any, job: Any, tmp_path: Path) -> None:
    directory = tmp_path / "step-000000001"
    directory.mkdir()
    variables = {"weights/head/kernel": np.ones((4, WIDTH), "float32")}
    write_files(directory, Checkpoint(step=1, variables=variables, progress={}, run={}))
    sign(directory, change_at(read_content(directory), ("variables", 0, key), value))
    with pytest.raises(DataError, match=re.escape(str(directory))):
        take_weights(job, directory)


# --- Any bytes ---


def whole_file(suffix: str) -> bytes:
    """The bytes of a right file of a format."""
    if suffix == ".safetensors":
        return safetensors_of(tensor(), np.ones((4, WIDTH), "float32").tobytes())
    content = io.BytesIO()
    write_h5(content, create(data=np.ones((4, WIDTH), "float32"), compression="gzip"))
    if suffix == ".weights.h5":
        return content.getvalue()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("model.weights.h5", content.getvalue())
    return archive.getvalue()


WHOLE = {suffix: whole_file(suffix) for suffix in (".weights.h5", ".keras", ".safetensors")}


def refusal_of(job: Any, file: Path) -> str:
    """Take weights; return the message of a DataError, which is empty if there was none."""
    try:
        take_weights(job, file)
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("suffix", WHOLE)
@slowly
@given(
    changes=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=8),
    cut=st.none() | st.integers(0, 2**12),
)
def test_any_bytes_are_taken_or_refused(
    suffix: str, changes: list[tuple[int, int]], cut: int | None, job: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = bytearray(WHOLE[suffix])
    for place, value in changes:
        data[place % len(data)] = value
    file = tmp_path_factory.getbasetemp() / f"any{suffix}"
    file.write_bytes(data[:cut])
    with contextlib.suppress(UsageError):  # none of its variables has the right name and shape
        refusal = refusal_of(job, file)
        assert not refusal or str(file) in refusal
