"""Options of launchers that a reader does not know: a misspelled number of machines must not pass in silence.

Names: torch 2.9 (torch/distributed/run.py) and Slurm 24.11 (the manual of sbatch).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import dropwhile
from pathlib import PurePath

from megaloom.dsl.quoting import shortened

from .run import Note
from .words import Word

TORCHRUN = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch"})
_TORCHRUN = """
nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf standalone max-restarts monitor-interval
start-method event-log-handler role module no-python run-path log-dir redirects tee local-ranks-filter node-rank
master-addr master-port local-addr logs-specs numa-binding signals-to-handle virtual-local-rank use-env use_env
duplicate-stdout-filters duplicate-stderr-filters help
"""
TORCHRUN_OPTIONS = frozenset(_TORCHRUN.split())
_SBATCH = """
account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint contiguous container
container-id core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution
error exclude exclusive export export-file extra extra-node-info get-user-env gid gpu-bind gpu-freq gpus gpus-per-node
gpus-per-socket gpus-per-task gres gres-flags help hint hold ignore-pbs input job-name kill-on-invalid-dep licenses
mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice no-kill no-requeue nodefile
nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket oom-kill-step open-mode output
overcommit oversubscribe parsable partition power prefer priority profile propagate qos quiet reboot requeue reservation
resv-ports segment share signal sockets-per-node spread-job spread-segments stepmgr switches test-only thread-spec
threads-per-core time time-min tmp tres-bind tres-per-task uid usage use-min-nodes verbose version wait wait-all-nodes
wckey wrap
"""
SBATCH_OPTIONS = frozenset(_SBATCH.split())


def unknown_options(before: Sequence[Word], sbatch: Mapping[str, Word]) -> Iterator[Note]:
    """Yield the options of torchrun and of `#SBATCH` lines that are not known, which are left out.

    before: the words of a command before its program.
    """
    for word in dropwhile(lambda one: PurePath(one.text).name not in TORCHRUN, before):
        name = word.text.partition("=")[0].removeprefix("--")
        if word.text.startswith("--") and name.replace("_", "-") not in TORCHRUN_OPTIONS:
            yield Note(f"torchrun's option --{shortened(name, 40)} is not known, and left out", word.origin)
    for name, word in sbatch.items():
        if len(name) > 1 and name not in SBATCH_OPTIONS:
            yield Note(f"sbatch's option --{shortened(name, 40)} is not known, and left out", word.origin)
