"""From the facts of all ranks to the findings of one table: pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from ringtrain.doctor.facts import AllReduce, Facts
from ringtrain.doctor.judging import MIB, Finding, judge
from ringtrain.messages.ranks import name_ranks


def judge_ranks(ranks: Sequence[Facts], all_reduce: AllReduce | None) -> list[Finding]:
    """Rank 0's findings, what is not well on other ranks, whether all are alike, and what they did together."""
    findings = judge(ranks[0])
    return [
        *findings,
        *judge_others(ranks),
        judge_versions(ranks),
        *plan_rows(ranks),
        *judge_shared_gpus(ranks),
        *([judge_all_reduce(all_reduce, len(ranks))] if all_reduce else []),
    ]


def judge_others(ranks: Sequence[Facts]) -> list[Finding]:
    """What is not well on other ranks and is not what rank 0 found, each finding once, with the ranks that have it."""
    known = set(judge(ranks[0]))
    where: dict[Finding, list[Facts]] = {}
    for facts in ranks[1:]:
        for finding in judge(facts):
            if finding.status != "ok" and finding not in known:
                where.setdefault(finding, []).append(facts)
    return [
        Finding(
            subject=finding.subject,
            status=finding.status,
            text=f"{name_ranks_of(facts, ranks)}: {finding.text}",
            remedy=finding.remedy,
        )
        for finding, facts in where.items()
    ]


def judge_versions(ranks: Sequence[Facts]) -> Finding:
    """Whether all ranks have the same packages; each rank that differs from rank 0 is named."""
    first = versions_of(ranks[0])
    differences: dict[tuple[str, str], list[Facts]] = {}
    for facts in ranks[1:]:
        for name, version in versions_of(facts).items():
            if version != first[name]:
                differences.setdefault((name, version), []).append(facts)
    if not differences:
        listed = ", ".join(version for version in first.values() if not version.startswith("no "))
        return Finding(subject="versions", status="ok", text=f"the same on all {len(ranks)} ranks: {listed}")
    text = "; ".join(
        f"{name_ranks_of(facts, ranks)}: {version} (rank 0: {first[name]})"
        for (name, version), facts in differences.items()
    )
    # Ranks whose programs compute differently train apart unseen.
    is_broken = bool({"TensorFlow", "Keras", "Horovod"} & {name for name, _ in differences})
    return Finding(
        subject="versions", status="broken" if is_broken else "warning", text=text,
        remedy="use one environment for all nodes, by a shared path",
    )  # fmt: skip


def versions_of(facts: Facts) -> dict[str, str]:
    """What must be alike on all ranks: a name and its version, by the name."""
    stack = facts.stack
    numbers = {
        "Python": stack.python,
        "TensorFlow": stack.versions.get("tensorflow"),
        "Keras": stack.versions.get("keras"),
        "Horovod": stack.versions.get("horovod"),
        "mpi4py": stack.versions.get("mpi4py"),
        "NCCL": stack.nccl,
    }
    named = {name: f"{name} {number}" if number else f"no {name}" for name, number in numbers.items()}
    return {**named, "MPI": stack.mpi_library or "no MPI"}


def plan_rows(ranks: Sequence[Facts]) -> list[Finding]:
    """Which rank computes on what, a row for each node."""
    nodes: dict[str, list[Facts]] = {}
    for facts in ranks:
        nodes.setdefault(facts.node, []).append(facts)
    rows = []
    for node, mine in nodes.items():
        plan = ", ".join(f"rank {facts.rank}: {facts.device or 'no device'}" for facts in mine)
        rows.append(Finding(subject="plan", status="ok", text=f"{node}: {plan}"))
    return rows


def judge_shared_gpus(ranks: Sequence[Facts]) -> list[Finding]:
    """Ranks that have the same GPU: each may see that one alone, and take it for its own."""
    owners: dict[tuple[str, str], list[Facts]] = {}
    for facts in ranks:
        if facts.gpu:
            owners.setdefault((facts.node, facts.gpu), []).append(facts)
    return [
        Finding(
            subject="GPUs", status="broken", text=f"{name_ranks_of(facts, ranks)} have the same GPU {gpu}",
            remedy="start fewer ranks on a node, or show each its own (srun --gpus-per-task=1)",
        )
        for (_, gpu), facts in owners.items()
        if len(facts) > 1
    ]  # fmt: skip


def judge_all_reduce(result: AllReduce, size: int) -> Finding:
    """One all-reduce: its sum, its time and its bandwidth.

    Bus bandwidth as nccl-tests defines it (doc/PERFORMANCE.md): bytes / time * 2 (n - 1) / n, which is what each
    link of a ring carries, whatever the number of ranks.
    """
    bus = bus_bandwidth(result.payload_bytes, result.seconds, size)
    text = (
        f"{result.payload_bytes // MIB} MiB among {size} ranks by {result.description} in "
        f"{result.seconds * 1e3:.1f} ms: {bus / 1e9:.2f} GB/s (bytes / time x 2 (n - 1) / n)"
    )
    if result.is_right:
        return Finding(subject="all-reduce", status="ok", text=f"{text}; the sum is right")
    return Finding(
        subject="all-reduce", status="broken", text=f"{text}; THE SUM IS WRONG",
        remedy="try another carrier: horovodrun --gloo, or NCCL_P2P_DISABLE=1; then look at the network's driver",
    )  # fmt: skip


def bus_bandwidth(payload_bytes: int, seconds: float, size: int) -> float:
    """Bytes per second over each link of a ring."""
    return payload_bytes / seconds * 2 * (size - 1) / size


def name_ranks_of(facts: Sequence[Facts], ranks: Sequence[Facts]) -> str:
    """Some ranks of the run in words, with their hosts."""
    return name_ranks([one.rank for one in facts], [one.node for one in ranks])
