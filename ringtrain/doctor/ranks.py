"""Findings from the facts of all ranks: pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from ringtrain.collectives.timing import bus_bandwidth
from ringtrain.doctor.facts import PAYLOAD_BYTES, SHORT_BYTES, AllReduce, Facts
from ringtrain.doctor.judging import KIB, MIB, Finding, judge
from ringtrain.messages.ranks import name_ranks


def judge_ranks(ranks: Sequence[Facts], all_reduce: AllReduce | None) -> list[Finding]:
    return [
        *judge(ranks[0]),
        *judge_others(ranks),
        judge_versions(ranks),
        *plan_rows(ranks),
        *judge_shared_gpus(ranks),
        *([judge_all_reduce(all_reduce, len(ranks))] if all_reduce else []),
    ]


def judge_others(ranks: Sequence[Facts]) -> list[Finding]:
    """Other ranks' problems, each once."""
    known = set(judge(ranks[0]))
    where: dict[Finding, list[Facts]] = {}
    for facts in ranks[1:]:
        for finding in judge(facts):
            if finding.status != "ok" and finding not in known:
                where.setdefault(finding, []).append(facts)
    return [finding._replace(text=f"{name_ranks_of(facts, ranks)}: {finding.text}") for finding, facts in where.items()]


def judge_versions(ranks: Sequence[Facts]) -> Finding:
    first = versions_of(ranks[0])
    differences: dict[tuple[str, str], list[Facts]] = {}
    for facts in ranks[1:]:
        for name, version in versions_of(facts).items():
            if version != first[name]:
                differences.setdefault((name, version), []).append(facts)
    if not differences:
        listed = ", ".join(version for version in first.values() if not version.startswith("no "))
        return Finding("ok", f"the same on all {len(ranks)} ranks: {listed}", subject="versions")
    text = "; ".join(
        f"{name_ranks_of(facts, ranks)}: {version} (rank 0: {first[name]})"
        for (name, version), facts in differences.items()
    )
    # Silent divergence.
    is_broken = bool({"TensorFlow", "Keras", "Horovod"} & {name for name, _ in differences})
    remedy = "use one environment for all nodes, by a shared path"
    return Finding("broken" if is_broken else "warning", text, remedy, subject="versions")


def versions_of(facts: Facts) -> dict[str, str]:
    versions = facts.stack.versions
    numbers = {
        "Python": facts.stack.python,
        "TensorFlow": versions.get("tensorflow"),
        "Keras": versions.get("keras"),
        "Horovod": versions.get("horovod"),
        "mpi4py": versions.get("mpi4py"),
        "NCCL": facts.stack.nccl,
    }
    named = {name: f"{name} {number}" if number else f"no {name}" for name, number in numbers.items()}
    return {**named, "MPI": facts.stack.mpi_library or "no MPI"}


def plan_rows(ranks: Sequence[Facts]) -> list[Finding]:
    plans: dict[str, list[str]] = {}
    for facts in ranks:
        plans.setdefault(facts.world.node, []).append(f"rank {facts.world.rank}: {facts.device or 'no device'}")
    return [Finding("ok", f"{node}: {', '.join(plan)}", subject="plan") for node, plan in plans.items()]


def judge_shared_gpus(ranks: Sequence[Facts]) -> list[Finding]:
    """Find ranks that share a GPU, which each may see as its own."""
    owners: dict[tuple[str, str], list[Facts]] = {}
    for facts in ranks:
        if facts.gpu:
            owners.setdefault((facts.world.node, facts.gpu), []).append(facts)
    remedy = "start fewer ranks on a node, or show each its own (srun --gpus-per-task=1)"
    return [
        Finding("broken", f"{name_ranks_of(facts, ranks)} have the same GPU {gpu}", remedy, subject="GPUs")
        for (_, gpu), facts in owners.items()
        if len(facts) > 1
    ]


def judge_all_reduce(result: AllReduce, size: int) -> Finding:
    bus = bus_bandwidth(PAYLOAD_BYTES, result.seconds, size)
    text = (
        f"{PAYLOAD_BYTES // MIB} MiB among {size} ranks by {result.description} in "
        f"{result.seconds * 1e3:.1f} ms: {bus / 1e9:.2f} GB/s (bytes / time x 2 (n - 1) / n); "
        f"{SHORT_BYTES // KIB} KiB in {result.short_seconds * 1e3:.2f} ms"
    )
    if result.is_right:
        return Finding("ok", f"{text}; the sums are right", subject="all-reduce")
    remedy = "try --backend horovod, horovodrun --gloo, or NCCL_P2P_DISABLE=1; then look at the network's driver"
    return Finding("broken", f"{text}; A SUM IS WRONG", remedy, subject="all-reduce")


def name_ranks_of(facts: Sequence[Facts], ranks: Sequence[Facts]) -> str:
    return name_ranks([one.world.rank for one in facts], [one.world.node for one in ranks])
