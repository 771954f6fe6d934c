# A machine without a GPU:   docker build -t rlinf .
# NVIDIA GPUs:               docker build -t rlinf --build-arg TORCH_INDEX= .     (or the URL of a package index for torch)
# With simulators and tests: docker build -t rlinf --build-arg SETUP="--locked --dev --sims" .
#
#   docker run --rm rlinf                                                  what works: rlinf doctor
#   docker run --rm -v "$PWD/runs:/runs" rlinf train experiment=quickstart
#   docker run --rm --gpus all --shm-size=8g -v "$PWD/runs:/runs" rlinf train ...
ARG PYTHON=3.11
FROM python:${PYTHON}-slim-bookworm

# As RLINF_TORCH_INDEX of scripts/setup.sh: cpu, a URL, or nothing for pip's own, which on Linux is the build for CUDA.
ARG TORCH_INDEX=cpu
# Options of scripts/setup.sh. A build sees no GPU, so --vllm takes the build of vLLM for CPUs.
ARG SETUP=--locked

ENV RLINF_VENV=/opt/venv \
    PATH=/opt/venv/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics

WORKDIR /opt/rlinf
COPY . .
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=SC2086
RUN RLINF_TORCH_INDEX="$TORCH_INDEX" bash scripts/setup.sh $SETUP && rm -rf /var/lib/apt/lists/*

# Runs are written below the folder where the command starts.
WORKDIR /runs
ENTRYPOINT ["rlinf"]
CMD ["doctor"]
