"""Names of the files and folders of a run, an evaluation and a checkpoint, except those of transformers' model folders."""

# Of a run and of an evaluation
LATEST = "latest"  # link next to the run folders of an experiment, to the last run that started to write checkpoints
LOCK_FILE, CONFIG_FILE, MANIFEST_FILE = ".lock", "config.yaml", "manifest.json"
METRICS_FILE, DAMAGED_FILE = "metrics.jsonl", "metrics.damaged.jsonl"
SUMMARY_FILE, REPORT_FILE = "summary.json", "report.html"  # written last
PROFILE_FOLDER, TENSORBOARD_FOLDER, FAILED_BATCH_FOLDER = "profile", "tensorboard", "failed_batch"
REFERENCE_FILE = "reference.safetensors"  # the trained weights at the start of RL, for a KL penalty
FROZEN_FOLDER = "frozen"  # the base policies of the checkpoints' actors, by the digests of their weights
SAMPLES_FOLDER = "samples"  # completions and rewards of each validation of a recipe

# Of an evaluation
EVALUATIONS_FOLDER = "eval"  # in a run, with a folder for each tag
RESULT_FILE, COMPARISON_FILE = "result.json", "compare.json"
CLASSIFIER_FILE, CLASSIFIER_WEIGHTS = "classifier.json", "classifier.safetensors"  # of `rlinf classifier`
TIMING_FILE = "timing.json"  # lateness, latencies and lost steps of a robot
PARTIAL_FILE = "result.partial.jsonl"  # of rank 0; rank 2 writes to result.partial.2.jsonl
VIDEOS_FOLDER, RECORDINGS_FOLDER = "videos", "episodes"
STARTS_FOLDER = "starts"  # first images of a robot's episodes, for an operator who resets the scene
ROBOT_EPISODES_FOLDER = "recorded"  # episodes of a robot, before the export to a dataset
BASELINE_FOLDER = "episodes_of_baseline"  # copies of the recordings of the baseline, so that the folder can be moved
AUDIT_FILE, PARTIAL_AUDIT = "audit.json", "audit.partial"
CONDITIONS_FILE, RECORDS_FILE = "conditions.json", "records.npz"  # of an unfinished audit

# Of a checkpoint
CHECKPOINTS_FOLDER, SAFETENSORS_FOLDER, FINAL_FOLDER = "checkpoints", "safetensors", "final"
STATE_FILE, TRAINER_FOLDER, RANDOM_FOLDER = "state.json", "trainer_state", "rng"
ROLLBACKS_FILE = "rollbacks.json"  # number of rollbacks to it, and the halved trainer.learning_rate
MODEL_FOLDER, ADAPTER_FOLDER = "model", "adapter"
ADAPTER_FILE, FULL_FILE = "adapter_model.safetensors", "trained_in_full.safetensors"
STATISTICS_FILE = "dataset_statistics.json"
POLICY_FILE = "policy.json"  # arguments of the constructor that are not in config.json
ACTOR_SETTINGS, ACTOR_WEIGHTS = "actor.json", "actor.safetensors"
