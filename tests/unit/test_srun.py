"""Which MPI srun is asked for, by what the site's srun names."""

from pathlib import Path

import pytest

from ringtrain.runtime.srun import ask_srun, choose_mpi, find_mpi

SLURM_22 = """\
MPI plugin types are...
\tpmix
\tnone
\tcray_shasta
\tpmi2
specific pmix plugin versions available: pmix_v4
"""
SLURM_18 = """\
srun: MPI types are...
srun: pmix_v2
srun: pmi2
srun: none
srun: openmpi
srun: pmix
"""
VERSIONS_ALONE = "srun: MPI types are...\nsrun: pmix_v2\nsrun: pmix_v10\nsrun: pmix_v3\nsrun: pmi2\n"


@pytest.mark.parametrize(
    ("listing", "chosen"),
    [
        (SLURM_22, "pmix"),
        (SLURM_18, "pmix"),
        (VERSIONS_ALONE, "pmix_v10"),
        ("MPI plugin types are...\n\tnone\n\tpmi2\n", "pmi2"),
        ("srun: MPI types are... none, openmpi, pmi2\n", "pmi2"),
        ("MPI plugin types are...\n\tnone\n\tcray_shasta\n", "horovodrun"),
        ("", "horovodrun"),
    ],
)
def test_pmix_comes_before_pmi2_and_horovodrun_last(listing: str, chosen: str) -> None:
    assert choose_mpi(listing) == chosen


def test_a_site_without_pmix_or_pmi2_uses_horovodrun() -> None:
    said: list[str] = []
    assert find_mpi(said.append, lambda: "MPI plugin types are...\n\tnone\n") == "horovodrun"
    assert "ssh" in said[0]
    assert find_mpi(said.append, lambda: SLURM_22) == "pmix"
    assert len(said) == 1


def test_without_an_answer_of_srun_pmix_is_used_and_reported() -> None:
    said: list[str] = []
    assert find_mpi(said.append, lambda: None) == "pmix"
    assert "--mpi" in said[0]


@pytest.mark.parametrize("script", [None, "exit 1", "echo pmix >&2; exit 1"])
def test_a_missing_or_failing_srun_gives_no_answer(
    script: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script is not None:
        (tmp_path / "srun").write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask_srun() is None


def test_both_streams_of_srun_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "srun").write_text('#!/bin/bash\n[ "$*" = --mpi=list ] && echo pmix >&2\n')
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert choose_mpi(ask_srun() or "") == "pmix"
