#!/bin/bash
# ringtrain: 64 ranks, 16 on each of 4 nodes, started by horovodrun.
#SBATCH --job-name=ringtrain
#SBATCH --output=%x-%j.out
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=16
#SBATCH --cpus-per-task=1
#SBATCH --qos=long
#SBATCH --constraint=rack1|rack2
# So many seconds before the time limit this shell (B:) is told, which passes it on to the ranks: they save and stop.
#SBATCH --signal=B:USR1@300
# The job may start again under its number: after a lost node by Slurm, after a save or a failure by the last line of
# this script.
#SBATCH --requeue
#SBATCH --open-mode=append

stop() {
    echo "launch: error: $*" >&2
    exit 2
}

hook=$("${CONDA_EXE:-conda}" shell.bash hook) || stop 'there is no conda on PATH; load its module first'
eval "$hook"
conda activate ringtrain || stop 'conda activate ringtrain failed; see: conda env list'

export HOROVOD_LOG_LEVEL=info

# Here the ranks say which run directory is open and how the run ended, since exit codes get blurred on their way. Each
# start has a directory of its own: ranks on a node that was lost may still write into theirs.
export RINGTRAIN_LAUNCH_DIR=$SLURM_SUBMIT_DIR/.launch/$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
mkdir -p "$RINGTRAIN_LAUNCH_DIR" || stop 'submit from a directory that all nodes share and you may write to'
rm -f "$RINGTRAIN_LAUNCH_DIR"/*.json

echo "launch: job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}, on $SLURM_JOB_NODELIST, $(date '+%F %T')" >&2

# This site's srun cannot start MPI programs (it has neither PMIx nor PMI2). horovodrun needs ssh to the other nodes that
# asks for no password.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed 's/$/:16/' | paste -sd,)
[ -n "$hosts" ] || stop 'scontrol does not name the nodes of this job'

horovodrun -np 64 -H "$hosts" \
    python -m ringtrain &
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
