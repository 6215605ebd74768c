# The common part of all batch scripts: the environment, and a job that requeues itself.
#
# If site.sh exists beside this file, this script reads it. Put there what differs between clusters:
# modules, the Python environment, NCCL's interface (docs/how-to/slurm.md).

# Slurm sends USR1 as a notice before the time limit (--signal) or before a preemption. Handle it
# from the first line on, because it can arrive while modules load.
noticed=
trap 'noticed=1' USR1 TERM

# With this variable cd prints the folder, and may choose another one.
unset CDPATH
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ ! -x "$folder/../.venv/bin/python" ] || PATH=$(cd "$folder/../.venv/bin" && pwd):$PATH
[ ! -r "$folder/site.sh" ] || source "$folder/site.sh"

export KFAC_STATE_FILE=$PWD/$SLURM_JOB_NAME-$SLURM_JOB_ID.state
# The file may be left from an earlier start. If this start dies early, the old state must not
# count.
rm -f "$KFAC_STATE_FILE"
# srun no longer takes this option over from sbatch.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SRUN_CPUS_PER_TASK}

# The last task's SLURM_JOB_ID equals the array's id, and would mean the whole array.
if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then job_id=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
else job_id=$SLURM_JOB_ID; fi

# train OVERRIDE...: run kfac-train with one rank per task. In an array a job's number is its seed.
train() {
  [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || set -- "$@" "seed=$SLURM_ARRAY_TASK_ID"
  step python -m kfac_bench "$@"
}

# step COMMAND...: run a command on all tasks, and end the job with it. A notice from Slurm goes on
# to the ranks, which then save. Afterwards the run's state decides whether the job is requeued. An
# exit code cannot decide, because it comes from srun or torchrun. Some clusters preempt with TERM to
# the ranks alone; then the state is the only sign. After the first rank has ended or died, the
# other ranks have a minute to end.
step() {
  local step code state=none
  srun --kill-on-bad-exit=0 --wait=60 "$@" &
  step=$!
  trap 'noticed=1; kill -USR1 "$step" 2>/dev/null' USR1
  [ -z "$noticed" ] || kill -USR1 "$step" 2>/dev/null
  # A trap ends wait early, so wait again as long as the step runs.
  while wait "$step"; code=$?; kill -0 "$step" 2>/dev/null; do :; done
  [ ! -r "$KFAC_STATE_FILE" ] || read -r state _ <"$KFAC_STATE_FILE"
  case $state in
    reached | finished) rm -f "$KFAC_STATE_FILE"; exit 0 ;;
    failed) exit "$code" ;;
    interrupted) noticed=1 ;;
  esac
  [ -z "$noticed" ] || requeue
  exit "$code"
}

requeue() {
  # A user who cancels the job sends TERM too. Such a job is no longer running, and must not return.
  [ "$(squeue --noheader --jobs "$job_id" --states all --format %T)" = RUNNING ] || return
  if [ "${SLURM_RESTART_COUNT:-0}" -ge "${KFAC_MAX_REQUEUES:-100}" ]; then
    echo "slurm: requeued ${SLURM_RESTART_COUNT:-0} times (KFAC_MAX_REQUEUES); not requeued again"
  else
    echo "slurm: the run is interrupted; the job goes back into the queue"
    scontrol requeue "$job_id" && exit 0
  fi
}
