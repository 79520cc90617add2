"""A script that prepares the shards of a corpus in a Slurm array and merges them, for people to look through."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from string import Template

from terakoya.errors import UserError

_SCRIPT = Template(r"""#!/bin/bash
# Encodes a corpus in $shards Slurm jobs and joins their stores. Look through the settings, then run it where jobs are
# submitted: bash THIS_FILE. Run again after a failure it finishes what is left: jobs that were done say so and end.
# Each job holds its own shard against --max-rejects.
set -euo pipefail

JOB_NAME=terakoya-prepare
PARTITION=          # empty: the cluster's default; so are the next two
ACCOUNT=
QOS=
TIME=24:00:00       # of one job
CPUS=4              # of one job: that many processes encode in it
MEMORY=16G          # of one job
MORE=()             # more options of sbatch, such as (--constraint=cpu --mail-type=FAIL)
SHARDS=$shards
# What a job runs first, so that it finds terakoya:
SETUP=$setup
# Where jobs start; other paths may be relative to it:
FOLDER=$folder
OUT=$out

# ---------------------------------------------------------------------------------------------------------------------
cd "$$FOLDER"
if [ -e "$$OUT/store.json" ]; then
  echo "$$OUT is finished already; $$OUT.shards can be removed"
  exit 0
fi
mkdir -p "$$OUT.shards/logs"
export SETUP FOLDER OUT SHARDS CPUS
options=(--parsable --export=ALL --requeue --time="$$TIME" --cpus-per-task="$$CPUS" --mem="$$MEMORY" --chdir="$$FOLDER")
[ -z "$$PARTITION" ] || options+=(--partition="$$PARTITION")
[ -z "$$ACCOUNT" ] || options+=(--account="$$ACCOUNT")
[ -z "$$QOS" ] || options+=(--qos="$$QOS")
options+=($${MORE[@]+"$${MORE[@]}"})

encode() {  # the options of sbatch that say which shards, and after which job
  sbatch "$${options[@]}" --job-name="$$JOB_NAME" --output="$$OUT.shards/logs/%A_%a.out" "$$@" <<'END'
#!/bin/bash
set -euo pipefail
eval "$$SETUP"
cd "$$FOLDER"
shard="$$OUT.shards/$$SLURM_ARRAY_TASK_ID"
$prelude$command --shard "$$SLURM_ARRAY_TASK_ID/$$SHARDS" --out "$$shard"
END
}

$encode

merge=$$(sbatch "$${options[@]}" --job-name="$$JOB_NAME-merge" --output="$$OUT.shards/logs/merge-%j.out" \
  --dependency="afterok:$${encoding%%;*}" --kill-on-invalid-dep=yes <<'END'
#!/bin/bash
set -euo pipefail
eval "$$SETUP"
cd "$$FOLDER"
[ ! -e "$$OUT/store.json" ] || exit 0
stores=()
for ((shard = 1; shard <= SHARDS; shard++)); do stores+=("$$OUT.shards/$$shard"); done
terakoya store merge "$${stores[@]}" --out "$$OUT"
END
)
echo "submitted: job $${encoding%%;*} encodes $$SHARDS shards, job $${merge%%;*} then joins them into $$OUT"
echo "logs: $$OUT.shards/logs; $$OUT.shards can be removed then"
""")

_ENCODE = 'encoding=$(encode --array="1-$SHARDS")'
_ENCODE_CLEANED = """# The first shard's job decides which documents the cleaning drops; the others take that over.
first=$(encode --array=1-1)
encoding=$(encode --array="2-$SHARDS" --dependency="afterok:${first%%;*}" --kill-on-invalid-dep=yes)"""
_TAKE_OVER = """if [ "$SLURM_ARRAY_TASK_ID" != 1 ] && [ ! -e "$shard.clean" ]; then
  rm -rf "$shard.clean.draft"
  cp -r "$OUT.shards/1.clean" "$shard.clean.draft"
  mv "$shard.clean.draft" "$shard.clean"
fi
"""


def array_script(
    before: Sequence[str],
    arguments: Sequence[str],
    *,
    out: Path,
    shards: int,
    folder: Path,
    programs: Path,
    processes: int | None = None,
    cleaning: bool = False,
) -> str:
    """The text of a bash script that submits `shards` jobs of `terakoya BEFORE prepare ARGUMENTS --shard i/n` and one
    that merges their stores into `out`.

    `folder` is where the jobs start, `programs` where `terakoya` is; `processes` each job's, by default its CPUs.
    `cleaning`: the arguments have cleaning steps, whose plan is made once. Raises UserError for fewer than two shards.
    """
    if shards < 2:
        raise UserError(f"--slurm-array: expected at least 2 shards, got {shards}")
    command = [shlex.join(["terakoya", *before, "prepare", *arguments])]
    command.append("--processes " + ('"${SLURM_CPUS_PER_TASK:-$CPUS}"' if processes is None else str(processes)))
    return _SCRIPT.substitute(
        shards=shards,
        setup=shlex.quote(f'export PATH={shlex.quote(str(programs))}:"$PATH"'),
        folder=shlex.quote(str(folder)),
        out=shlex.quote(str(out)),
        command=" ".join(command),
        prelude=_TAKE_OVER if cleaning else "",
        encode=_ENCODE_CLEANED if cleaning else _ENCODE,
    )
