"""docs/launching.md says of Slurm what is there."""

import re
from pathlib import Path
from typing import Any

from launch.slurm.cli import advise, create_request_parser
from launch.slurm.job import JobRequest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "launching.md").read_text()
WORDS = " ".join(PAGE.split())
SOURCES = [path.read_text() for package in ("ringtrain", "launch") for path in (ROOT / package).rglob("*.py")]


def test_every_option_is_named() -> None:
    options = {option for action in create_request_parser("render", "")._actions for option in action.option_strings}
    missing = {option for option in options - {"-h", "--help"} if f"{option} " not in PAGE and f"{option}`" not in PAGE}
    assert missing - {"--to"} == set()
    assert "--to run.sh" in PAGE


def test_the_message_that_is_explained_is_ringtrain_s() -> None:
    message = "the launcher belongs to another MPI than Horovod"
    assert message in WORDS
    sources = [" ".join(re.sub(r'"\s+f?"', "", source).split()) for source in SOURCES]
    assert any(message in source for source in sources)


def test_the_page_shows_what_submit_prints() -> None:
    request = JobRequest(nodes=1, gpus_per_node=4, flags=("--out", "runs/resnet"))
    assert "\n".join(advise(request, "4711")) in PAGE


def test_advice_mentions_usr1_only_for_jobs_that_requeue() -> None:
    shape: dict[str, Any] = {"nodes": 1, "ranks_per_node": 2}
    assert "scancel --signal=USR1 7" in "\n".join(advise(JobRequest(**shape, mpi="pmix"), "7"))
    assert "scancel --batch --signal=USR1 7" in "\n".join(advise(JobRequest(**shape, mpi="horovodrun"), "7"))
    assert "USR1" not in "\n".join(advise(JobRequest(**shape, mpi="pmix", can_requeue=False), "7"))
