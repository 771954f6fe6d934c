"""The files of examples/cluster: run against a fake SLURM, and as KubeRay's types want them."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from run_results import SMALL_RUN

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "cluster"

SRUN = """#!/bin/bash
# Starts the tasks of a step on this machine, as far as the scripts can tell.
tasks="${FAKE_TASKS:-1}" node=""
while [[ "$1" == --* ]]; do
  case "$1" in --ntasks=*) tasks="${1#*=}" ;; --nodelist=*) node="${1#*=}" ;; esac
  shift
done
echo "${node:-all} $tasks RAY_ADDRESS=${RAY_ADDRESS:-} $*" >>"$FAKE_LOG"
pids=()
for ((task = 0; task < tasks; task++)); do
  SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_STEP_NUM_TASKS=$tasks "$@" &
  pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit "$status"
"""


SMALL = SMALL_RUN


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def run(folder: Path, script: str, words: list[str], commands: dict[str, str], **environment: str):
    """Run a script with some commands replaced."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    for name, text in commands.items():
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)
    return subprocess.run(
        ["bash", str(FOLDER / script), *words], cwd=folder, capture_output=True, text=True, timeout=200, check=False,
        env=os.environ | {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "FAKE_LOG": str(folder / "log"),
                          "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


def recording(name: str) -> str:
    return f'#!/bin/bash\necho "{name} $*" >>"$FAKE_LOG"\n'


def test_the_job_with_ranks_trains_under_a_fake_srun(tmp_path):
    """Two tasks are the two ranks of one run; without words the job is rejected."""
    rlinf = f'#!/bin/bash\nexec {sys.executable} -m rlinf "$@"\n'
    words = [*SMALL, "trainer.max_steps=1", "output_dir=run"]
    slurm = {"FAKE_TASKS": "2", "SLURM_JOB_NODELIST": "localhost", "MASTER_PORT": str(free_port())}
    done = run(tmp_path, "slurm_ranks.sh", words, {"srun": SRUN, "rlinf": rlinf}, **slurm)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report: ") == 1 and (tmp_path / "run" / "report.html").is_file()
    assert "2 ranks" in done.stdout
    assert run(tmp_path, "slurm_ranks.sh", [], {}).returncode == 2


def test_the_job_with_ray_starts_a_head_its_nodes_and_then_one_command(tmp_path):
    nodes = "#!/bin/bash\nprintf 'gpu-1\\ngpu-2\\ngpu-3\\n'\n"
    (tmp_path / "wait_for_ray.py").write_text(
        "import os, sys\nopen(os.environ['FAKE_LOG'], 'a').write('waited for ' + ' '.join(sys.argv[1:]) + '\\n')\n"
    )
    commands = {"srun": SRUN, "scontrol": nodes, "ray": recording("ray"), "rlinf": recording("rlinf")}
    slurm = {"SLURM_JOB_NODELIST": "gpu-[1-3]", "RLINF_CLUSTER_FOLDER": str(tmp_path), "RAY_ADDRESS": ""}
    done = run(tmp_path, "slurm_ray.sh", ["experiment=quickstart"], commands, **slurm)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "log").read_text().splitlines()
    command = "rlinf train resume=auto cluster.start=ray cluster.placement=disaggregated experiment=quickstart"
    assert [line for line in lines if line.endswith(command)] == [f"gpu-1 1 RAY_ADDRESS=gpu-1:6379 {command}", command]
    assert "gpu-1 1 RAY_ADDRESS= ray start --head --port=6379 --disable-usage-stats --block" in lines
    for node in ("gpu-2", "gpu-3"):
        assert f"{node} 1 RAY_ADDRESS= ray start --address=gpu-1:6379 --disable-usage-stats --block" in lines
    assert [line for line in lines if "waited" in line] == ["waited for gpu-1:6379 1", "waited for gpu-1:6379 3"]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["head"], "ray start --head --port=6379 --disable-usage-stats"),
        (["join", "a:6379"], "ray start --address=a:6379 --disable-usage-stats"),
        (["envs", "a:1"], 'ray start --address=a:1 --num-gpus=0 --resources={"rlinf_env": 1} --disable-usage-stats'),
        (["stop"], "ray stop"),
    ],
)
def test_a_machine_is_added_by_hand(tmp_path, words, wanted):
    assert run(tmp_path, "ray.sh", words, {"ray": recording("ray")}).returncode == 0
    assert (tmp_path / "log").read_text() == f"{wanted}\n"
    assert run(tmp_path, "ray.sh", ["join"], {}).returncode == 2


def test_ranks_of_a_machine_by_hand(tmp_path):
    commands = {"torchrun": recording("torchrun"), "nvidia-smi": "#!/bin/bash\nprintf 'GPU 0\\nGPU 1\\n'\n"}
    done = run(tmp_path, "torchrun.sh", ["train", "seed=1"], commands, FIRST="node-a", NODES="2", RANKS="")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "log").read_text() == (
        "torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=node-a:29500 --rdzv-id=1 -m rlinf train seed=1\n"
    )


def test_waiting_for_a_cluster_that_does_not_come_ends(tmp_path):
    words = [sys.executable, str(FOLDER / "wait_for_ray.py"), "127.0.0.1:1", "2", "0"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "has 0 machines after 0 s; expected 2" in done.stderr


def structure(required: str = "", /, **fields: dict) -> dict:
    return {"type": "object", "properties": fields, "required": required.split(), "additionalProperties": False}


def several(items: dict, **limits: int) -> dict:
    return {"type": "array", "items": items, **limits}


TEXT, NUMBER, TRUTH = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
MOUNT = structure("name mountPath", name=TEXT, mountPath=TEXT, subPath=TEXT, readOnly=TRUTH)
CLAIM = structure("claimName", claimName=TEXT, readOnly=TRUTH)
EMPTY = structure(medium={"enum": ["", "Memory"]}, sizeLimit=TEXT)
VOLUME = structure("name", name=TEXT, persistentVolumeClaim=CLAIM, emptyDir=EMPTY)
CONTAINER = structure(
    "name", name=TEXT, image=TEXT, imagePullPolicy=TEXT, command=several(TEXT), args=several(TEXT), env={"type": "array"},
    resources=structure(limits=TEXTS, requests=TEXTS), volumeMounts=several(MOUNT),
)  # fmt: skip
POD_SPEC = structure(
    "containers", containers=several(CONTAINER, minItems=1), volumes=several(VOLUME), nodeSelector=TEXTS,
    tolerations={"type": "array"},
)  # fmt: skip
POD = structure("spec", metadata={"type": "object"}, spec=POD_SPEC)
HEAD = structure("rayStartParams template", rayStartParams=TEXTS, template=POD, serviceType=TEXT)
WORKERS = structure(
    "groupName minReplicas maxReplicas rayStartParams template", groupName=TEXT, replicas=NUMBER, minReplicas=NUMBER,
    maxReplicas=NUMBER, numOfHosts=NUMBER, rayStartParams=TEXTS, template=POD,
)  # fmt: skip
CLUSTER = structure(
    "headGroupSpec",
    rayVersion=TEXT,
    headGroupSpec=HEAD,
    workerGroupSpecs=several(WORKERS),
    enableInTreeAutoscaling=TRUTH,
)
JOB = structure(
    entrypoint=TEXT, submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]}, backoffLimit=NUMBER,
    activeDeadlineSeconds=NUMBER, shutdownAfterJobFinishes=TRUTH, ttlSecondsAfterFinished=NUMBER, runtimeEnvYAML=TEXT,
    rayClusterSpec=CLUSTER,
)  # fmt: skip
KINDS = {"raycluster.yaml": ("RayCluster", CLUSTER), "rayjob.yaml": ("RayJob", JOB)}
"""The fields that our files may use, as the Go types of KubeRay's ray.io/v1 and of Kubernetes' pods declare them: a part of the
published schema, which is stricter only in that it knows no other fields."""


def resource_of(name: str) -> dict:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", KINDS)
def test_resources_have_the_fields_of_kuberay(name):
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema comes with Ray (scripts/setup.sh --ray)")
    kind, schema = KINDS[name]
    resource = resource_of(name)
    assert (resource["apiVersion"], resource["kind"]) == ("ray.io/v1", kind)
    jsonschema.validate(resource["spec"], schema)
    cluster = resource["spec"].get("rayClusterSpec", resource["spec"])
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        spec = group["template"]["spec"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        for container in spec["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    simulators = cluster["workerGroupSpecs"][1]["rayStartParams"]["resources"]
    assert json.loads(json.loads(simulators)) == {"rlinf_env": 1}  # KubeRay passes it through a shell
    for wrong in ({"groupNam": "x"}, {"replicas": "one"}):
        broken = yaml.safe_load(yaml.safe_dump(cluster))
        broken["workerGroupSpecs"][0] |= wrong
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, CLUSTER)


@pytest.mark.parametrize("name", KINDS)
def test_resources_fulfil_the_published_schema(name):
    """``RLINF_KUBERAY_CRDS`` is a folder with ray.io_rayclusters.yaml and ray.io_rayjobs.yaml of KubeRay's release."""
    folder = os.environ.get("RLINF_KUBERAY_CRDS")
    if not folder:
        pytest.skip("RLINF_KUBERAY_CRDS is not set to a folder with KubeRay's custom resource definitions")
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema comes with Ray (scripts/setup.sh --ray)")
    plural = KINDS[name][0].lower() + "s"
    definition = yaml.safe_load((Path(folder) / f"ray.io_{plural}.yaml").read_text(encoding="utf-8"))
    (version,) = [each for each in definition["spec"]["versions"] if each["name"] == "v1"]
    jsonschema.validate(resource_of(name), version["schema"]["openAPIV3Schema"])


def test_the_job_is_a_command_that_composes():
    from rlinf.config.compose import compose_config
    from rlinf.config.schema import build_config

    words = resource_of("rayjob.yaml")["spec"]["entrypoint"].split()
    assert words[:2] == ["rlinf", "train"]
    config = build_config(compose_config(words[2:]))
    assert (
        config.cluster.placement == "disaggregated"
        and config.cluster.num_rollout_workers % config.cluster.num_processes == 0
    )


def test_every_file_is_on_the_page():
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    assert set(re.findall(r"examples/cluster/([\w.]+)", page)) >= {path.name for path in FOLDER.iterdir()}
