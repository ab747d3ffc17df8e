#!/bin/bash
# ringtrain: 2 ranks, 1 on each of 2 nodes, started by srun.
#SBATCH --job-name=ringtrain
#SBATCH --output=%x-%A_%a.out
#SBATCH --nodes=3
#SBATCH --array=0-3%2
# The ranks use 2 of them. If one is lost the job keeps the others, and the last line of this script runs it again with
# the names of all lost nodes.
#SBATCH --no-kill
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
# So many seconds before the time limit srun's tasks, the ranks, are told to save and stop.
#SBATCH --signal=USR1@120
# The job may start again under its number: after a lost node by Slurm, after a save or a failure by the last line of
# this script.
#SBATCH --requeue
#SBATCH --open-mode=append

stop() {
    echo "launch: error: $*" >&2
    exit 2
}

# The settings of each run of the array.
# shellcheck disable=SC2054
case $SLURM_ARRAY_TASK_ID in
0) settings=(--optimizer.lr=0.1 --seed=1 '--data_dir=/data/a b' '--out=runs/a b/lr=0.1,seed=1,data_dir=_data_a_b') ;;
1) settings=(--optimizer.lr=0.1 --seed=2 '--data_dir=/data/a b' '--out=runs/a b/lr=0.1,seed=2,data_dir=_data_a_b') ;;
2) settings=(--optimizer.lr=0.01 --seed=1 '--data_dir=/data/a b' '--out=runs/a b/lr=0.01,seed=1,data_dir=_data_a_b') ;;
3) settings=(--optimizer.lr=0.01 --seed=2 '--data_dir=/data/a b' '--out=runs/a b/lr=0.01,seed=2,data_dir=_data_a_b') ;;
*) stop "this array has no run $SLURM_ARRAY_TASK_ID" ;;
esac

# Here the ranks say which run directory is open and how the run ended, since exit codes get blurred on their way. Each
# start has a directory of its own: ranks on a node that was lost may still write into theirs.
export RINGTRAIN_LAUNCH_DIR=$SLURM_SUBMIT_DIR/.launch/$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}${1:+.$#}
mkdir -p "$RINGTRAIN_LAUNCH_DIR" || stop 'submit from a directory that all nodes share and you may write to'
rm -f "$RINGTRAIN_LAUNCH_DIR"/*.json

echo "launch: job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}, on $SLURM_JOB_NODELIST${1:+ without $*}, $(date '+%F %T')" >&2

# Since Slurm 22.05 srun does not take the cores of a task from the job.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# With --no-kill Slurm does not start a job again that has lost the node of this script. Other nodes do: one more than
# the job can lose.
# shellcheck disable=SC2016
[ $# -gt 0 ] || srun --mpi=none --export=ALL --gres=none --overlap --no-kill --nodes=2 --ntasks=2 --exclude="$SLURMD_NODENAME" bash -c '
    trap "" USR1
    while sleep $((20 + RANDOM % 20)); do
        read -r first nodes < <(squeue --noheader --states=RUNNING --jobs="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" --format="%B %N") || continue
        hosts=$(scontrol show hostnames "$nodes") && ! grep -qxF -- "$first" <<<"$hosts" && scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    done' >/dev/null 2>&1 &

# A start that Slurm has lost with a node may live on there under the number of its step. When it notices that it has
# been replaced it has Slurm end the step of that number, so ours must have another. Its directory tells of it.
for former in "$SLURM_SUBMIT_DIR/.launch/$SLURM_JOB_ID"-*; do
    [ "$former" = "$RINGTRAIN_LAUNCH_DIR" ] || [ $# -gt 0 ] || srun --mpi=none true
done

# --export=ALL: the environment above reaches the ranks even where sbatch was told to pass none on.
# --kill-on-bad-exit: a rank that fails ends the others, which would wait for it for ever.
srun --mpi=pmix --export=ALL --kill-on-bad-exit=1 \
    --overlap --nodes=2 --ntasks=2 --exclude="$(IFS=, && echo "$*")" \
    python -m ringtrain --out 'runs/a b' "${settings[@]}" &
ranks=$!

# A signal for this shell is meant for the ranks, which then save at the same step and leave with exit code 75. It is
# passed on as USR1, since srun answers TERM by killing them.
trap 'kill -USR1 "$ranks" 2>/dev/null' USR1 TERM
# Each such signal ends a `wait` early. The last one returns the exit code, though the ranks are gone by then.
while kill -0 "$ranks" 2>/dev/null; do
    wait "$ranks"
done
wait "$ranks"
status=$?
trap '' USR1 TERM # nothing is left that they could stop

# Starts the job again if the run can resume; else says how it ended and returns its exit code.
exec python -m launch slurm after --status "$status" --script "$0" --max_requeues 20 --max_restarts 3 --spare_nodes 1 --lost_nodes "$@"
