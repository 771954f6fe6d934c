"""The commands of ``rlinf`` in the core and in the wings that are present."""

from rlinf.wings import Command, added

CORE_COMMANDS = {
    "train": Command(
        "rlinf.cli.run:train",
        "behaviour cloning (if configured), then reinforcement learning",
        "experiment=<name> [key=value ...]\n"
        "       rlinf train model=<name> env=<name> algorithm=<name> [key=value ...]",
        examples=(
            "rlinf train experiment=quickstart                      a small VLA on a laptop: SFT, then PPO, in minutes",
            "rlinf train experiment=quickstart seed=3 trainer.max_steps=20",
            "rlinf train model=openvla_tiny env=tabletop algorithm=ppo",
            "rlinf train experiment=quickstart --cfg job            print the configuration and stop",
            "rlinf train -m experiment=quickstart seed=0,1,2        one run per value",
        ),
        uses_ranks=True,
    ),
    "sft": Command(
        "rlinf.cli.run:sft",
        "behaviour cloning only",
        "experiment=<name> [key=value ...]",
        uses_ranks=True,
    ),
    "evaluate": Command(
        "rlinf.cli.run:evaluate",
        "success rate of a checkpoint on held-out episodes, with videos",
        "checkpoint=<folder> [key=value ...]\n"
        "       rlinf evaluate checkpoint=<folder> questions=<file> [key=value ...]\n"
        "       rlinf evaluate --compare A B",
        examples=("rlinf evaluate checkpoint=outputs/quickstart/latest evaluation.num_episodes=500",),
        uses_ranks=True,
    ),
    "serve": Command(
        "rlinf.cli.run:serve",
        "a checkpoint as a policy server for other machines and programs",
        "checkpoint=<folder> [port=8000] [host=127.0.0.1] [key=value ...]",
        examples=("rlinf serve checkpoint=outputs/quickstart/latest port=8000",),
        keys="rlinf.commands.serve_config:ServeConfig",
    ),
    "play": Command(
        "rlinf.cli.play:play",
        "one episode of a checkpoint as a video, in a window if there is a display",
        "checkpoint=<folder> [episode=...] [output=...] [window=...] [key=value ...]",
        examples=("rlinf play checkpoint=outputs/quickstart/latest episode=3",),
        keys="rlinf.cli.play:PlayConfig",
    ),
    "report": Command(
        "rlinf.cli.report:report",
        "report of a run, or curves of several runs with intervals over seeds",
        "<run folder> ... [output=runs.html]",
        examples=("rlinf report multirun/quickstart/latest                the runs of a sweep on one page",),
        has_config=False,
    ),
    "why": Command(
        "rlinf.cli.report:why",
        "diagnosis of a run from its metrics: the cause, and the key to change",
        "<run folder> [--json]",
        examples=("rlinf why outputs/quickstart/latest                    what its metrics show, and what to change",),
        has_config=False,
    ),
    "collect": Command(
        "rlinf.cli.run:collect",
        "demonstrations by the scripted expert, a checkpoint or a human, as a LeRobotDataset",
        "dataset=<new folder> [checkpoint=<folder> | teleoperator=browser] [key=value ...]",
        examples=("rlinf collect env=tabletop dataset=data/tabletop collect.num_episodes=200",),
    ),
    "convert": Command(
        "rlinf.cli.run:convert",
        "HDF5 demonstrations of robomimic or LIBERO, as a LeRobotDataset",
        "source=<HDF5 file or folder> dataset=<new folder> [key=value ...]",
        examples=("rlinf convert source=libero_spatial dataset=data/libero_spatial",),
        keys="rlinf.data.hdf5:ConvertConfig",
        has_config=False,
    ),
    "export": Command(
        "rlinf.cli.run:export",
        "a checkpoint as a folder for from_pretrained, optionally with merged adapters",
        "checkpoint=<folder> output=<new folder> [merge_lora=...] [key=value ...]",
        examples=("rlinf export checkpoint=outputs/quickstart/latest output=my_policy merge_lora=true",),
        keys="rlinf.cli.run:ExportConfig",
        has_config=False,
    ),
    "distil": Command(
        "rlinf.cli.run:distil",
        "a base policy and its actor as one ordinary policy, with paired results",
        "checkpoint=<folder> output=<new folder> [key=value ...]",
        examples=("rlinf distil checkpoint=outputs/quickstart_residual/latest output=distilled",),
        keys="rlinf.cli.run:DistilConfig",
    ),
    "doctor": Command(
        "rlinf.cli.doctor:doctor",
        "what works on this machine, and the memory that an experiment needs",
        "[experiment=<name> | checkpoint=<folder> | env=<name>] [key=value ...]",
        examples=("rlinf doctor experiment=quickstart",),
    ),
    "check": Command(
        "rlinf.cli.check:check",
        "whether an env, perhaps your own, fulfils its contract, property by property",
        "env=<name> [env.key=value ...] [plugins=[my_env.py]]",
        examples=("rlinf check env=gymnasium env.id=Pendulum-v1",),
    ),
    "diagnose": Command(
        "rlinf.cli.diagnose:diagnose",
        "whether a model's samples and scores agree, in torch and in vLLM",
        "model=<name> [key=value ...]\n       rlinf diagnose <folder or hub id> [key=value ...]",
        examples=("rlinf diagnose experiment=quickstart",),
    ),
    "models": Command(
        "rlinf.cli.listing:models",
        "registered models, envs, algorithms and experiments",
        "[plugins=[my_env.py]] [--config-dir <folder>]",
        has_config=False,
    ),
}

COMMANDS: dict[str, Command] = {**CORE_COMMANDS, **added("commands")}
