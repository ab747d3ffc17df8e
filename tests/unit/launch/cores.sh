#!/bin/bash
# ringtrain: 2 ranks, started by srun.
#SBATCH --job-name=ringtrain
#SBATCH --output=%x-%j.out
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
# So many seconds before the time limit srun's tasks, the ranks, are told to save and stop.
#SBATCH --signal=USR1@120
#SBATCH --no-requeue

stop() {
    echo "launch: error: $*" >&2
    exit 2
}

# Here the ranks say which run directory is open and how the run ended, since exit codes get blurred on their way. Each
# start has a directory of its own: ranks on a node that was lost may still write into theirs.
export RINGTRAIN_LAUNCH_DIR=$SLURM_SUBMIT_DIR/.launch/$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
mkdir -p "$RINGTRAIN_LAUNCH_DIR" || stop 'submit from a directory that all nodes share and you may write to'
rm -f "$RINGTRAIN_LAUNCH_DIR"/*.json

echo "launch: job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}, on $SLURM_JOB_NODELIST, $(date '+%F %T')" >&2

# Since Slurm 22.05 srun does not take the cores of a task from the job.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# --export=ALL: the environment above reaches the ranks even where sbatch was told to pass none on.
# --kill-on-bad-exit: a rank that fails ends the others, which would wait for it for ever.
srun --mpi=pmi2 --export=ALL --kill-on-bad-exit=1 \
    python -m ringtrain --workload digits &
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
exec python -m launch slurm after --status "$status" --script "$0" --max_requeues 0 --max_restarts 0
