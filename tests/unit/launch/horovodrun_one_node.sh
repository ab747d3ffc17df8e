#!/bin/bash
# ringtrain: 2 ranks, started by horovodrun.
#SBATCH --job-name=ringtrain
#SBATCH --output=%x-%j.out
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
# So many seconds before the time limit this shell (B:) is told, which passes it on to the ranks: they save and stop.
#SBATCH --signal=B:USR1@120
# The job may start again under its number: after a lost node by Slurm, after a save or a failure by the last line of
# this script.
#SBATCH --requeue
#SBATCH --open-mode=append

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

# This site's srun cannot start MPI programs (it has neither PMIx nor PMI2).
hosts=localhost:2 # not the node's name: horovodrun would reach that through ssh

horovodrun -np 2 -H "$hosts" \
    python -m ringtrain --workload digits &
ranks=$!

# A signal for this shell is meant for the ranks, which then save at the same step and leave with exit code 75. It is
# passed on as USR1, since mpirun answers TERM by killing them, and to the children: horovodrun has become a shell that
# waits for mpirun, or mpirun itself, whose children are the ranks of this node.
trap 'pkill -USR1 -P "$ranks"' USR1 TERM
# Each such signal ends a `wait` early. The last one returns the exit code, though the ranks are gone by then.
while kill -0 "$ranks" 2>/dev/null; do
    wait "$ranks"
done
wait "$ranks"
status=$?
trap '' USR1 TERM # nothing is left that they could stop

# Starts the job again if the run can resume; else says how it ended and returns its exit code.
exec python -m launch slurm after --status "$status" --script "$0" --max_requeues 20 --max_restarts 3
