"""The script that each instance of a training job runs: find its rank, start torchrun, export the model."""

from __future__ import annotations

from collections.abc import Sequence
from string import Template

from terakoya.components import Job
from terakoya_clusters.launchers.sagemaker.settings import ROOT, SageMakerSettings
from terakoya_launch.scripts import quote

SCRIPT = Template(r"""#!/bin/bash
# $name: each of $instances instance$s runs this script.
set -euo pipefail
export PYTHONUNBUFFERED=1

# The rank of this instance: from SM_HOSTS etc. if the container sets them, else from SageMaker's file.
facts=$$(python - << 'END'
import json, os, pathlib
file = pathlib.Path("$root/input/config/resourceconfig.json")
said = json.loads(file.read_text()) if file.is_file() else {}
hosts = json.loads(os.environ["SM_HOSTS"]) if "SM_HOSTS" in os.environ else said["hosts"]
here = os.environ.get("SM_CURRENT_HOST") or said["current_host"]
interface = os.environ.get("SM_NETWORK_INTERFACE_NAME") or said.get("network_interface_name", "")
print(len(hosts), hosts.index(here), hosts[0], interface)
END
)
read -r nodes rank master interface <<< "$$facts"
failure() { mkdir -p $root/output; echo "$$1" | tee $root/output/failure >&2; }
if [ "$$nodes" -ne $instances ]; then
  failure "batch_size is for $instances instance$s, SageMaker started $$nodes"
  exit 2
fi
processes=$processes
echo "node $$rank of $$nodes, $$processes process(es); node 0 is $$master"
[ -z "$$interface" ] || export NCCL_SOCKET_IFNAME="$$interface" GLOO_SOCKET_IFNAME="$$interface"
export OMP_NUM_THREADS="$${OMP_NUM_THREADS:-$$(( $$(nproc) > processes ? $$(nproc) / processes : 1 ))}"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$saving_seconds  # SageMaker kills what still runs two minutes after its SIGTERM
for _ in $$(seq 300); do getent hosts "$$master" > /dev/null && break; sleep 1; done

cd $root/input/data
set +u
$setup
set -u
written() { cat $run/metrics.jsonl 2> /dev/null || true; }
before=$$(written | wc -l)
metrics() {  # prints every metric for SageMaker's regular expressions
  until [ -e $run/metrics.jsonl ]; do sleep 1; done
  exec tail -n +$$(( before + 1 )) -f $run/metrics.jsonl
}
if [ "$$rank" -eq 0 ]; then
  metrics & teller=$$!
fi
asked=no
python -m terakoya_launch.torchrun_agent --nnodes "$$nodes" --node-rank "$$rank" --nproc-per-node "$$processes" \
  --master-addr "$$master" --master-port $port -m terakoya $command --node-rank "$$rank" & child=$$!
trap 'asked=yes; kill -TERM $$child 2> /dev/null || true' TERM
wait $$child || true
while kill -0 $$child 2> /dev/null; do wait $$child || true; done  # a signal interrupts wait
code=0
wait $$child || code=$$?
if [ "$$rank" -eq 0 ]; then
  sleep 2  # for the last metrics
  kill $$teller 2> /dev/null || true
fi

case $$asked,$$code in
  *,0) ;;
  yes,75)
    echo "stopped on request, checkpoint saved in $run; submit again to resume"
    exit 0 ;;
  yes,143)
    echo "stopped on request before there was anything to save; submit again"
    exit 0 ;;
  *,75)
    failure "stopped by a limit of the parameters, checkpoint saved; submit again to resume"
    exit 75 ;;
  *)
    failure "node $$rank exited with $$code; its log says why"
    exit $$code ;;
esac
$export
""")

EXPORT = Template(r"""if [ "$$rank" -eq 0 ]; then  # SageMaker packs this folder and uploads it to S3
  python -m terakoya ${before}export $run --out $root/model/model
fi""")

GPUS = (
    '${SM_NUM_GPUS:-$({ nvidia-smi --list-gpus 2> /dev/null || true; } | wc -l)}\n[ "$processes" -gt 0 ] || processes=1'
)
"""One process a GPU, one without a GPU."""

SAVING_SECONDS = 110
"""Time for processes to save: SageMaker kills them 120 seconds after its SIGTERM."""
PORT = 29500


def script(settings: SageMakerSettings, job: Job, *, run: str, command: str, global_options: Sequence[str]) -> str:
    """Returns the script for the instances of `job`.

    Args:
        run: the run's folder on the instances.
        command: the quoted arguments of `terakoya` to train.
        global_options: the options of `terakoya` before the verb, for the export.
    """
    instances = len(job.batch_size)
    return SCRIPT.substitute(
        name=job.name,
        instances=instances,
        s="s" if instances > 1 else "",
        root=ROOT,
        run=quote(run),
        command=command,
        setup="\n".join(settings.setup) or ":",
        processes=GPUS if settings.processes is None else str(settings.processes),
        saving_seconds=SAVING_SECONDS,
        port=PORT,
        export=EXPORT.substitute(
            before="".join(f"{quote(word)} " for word in global_options), run=quote(run), root=ROOT
        )
        if settings.export
        else "",
    )
