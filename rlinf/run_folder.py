"""Names of files and folders in runs, evaluations and checkpoints, except for files in transformers model folders."""

# Runs and evaluations
LATEST = "latest"  # link next to an experiment's run folders, to the last run that wrote its first checkpoint
LOCK_FILE, CONFIG_FILE, MANIFEST_FILE = ".lock", "config.yaml", "manifest.json"
METRICS_FILE, DAMAGED_FILE = "metrics.jsonl", "metrics.damaged.jsonl"
SUMMARY_FILE, REPORT_FILE = "summary.json", "report.html"  # written last
PROFILE_FOLDER, TENSORBOARD_FOLDER, FAILED_BATCH_FOLDER = "profile", "tensorboard", "failed_batch"
REFERENCE_FILE = "reference.safetensors"  # trained weights at the start of RL, for the KL penalty
INITIAL_FILE = "initial.safetensors"  # trained weights before cloning, from which algorithm=filtered_bc restarts
FROZEN_FOLDER = "frozen"  # base policies of the checkpoints' actors, named by weight digest
SUCCESSES_FOLDER = "successes"  # datasets of a run's successful episodes (algorithm=filtered_bc)
SAMPLES_FOLDER = "samples"  # completions and rewards of each validation of a recipe

# Evaluations
EVALUATIONS_FOLDER = "eval"  # in a run folder, with a folder per tag
FRESH_EVALUATION = "fresh"  # tag of the chosen checkpoint's evaluation on episodes that did not choose it
SAMPLED_FOLDER = "sampled"  # below it: the same with sampled actions
RESULT_FILE, COMPARISON_FILE = "result.json", "compare.json"
CLASSIFIER_FILE, CLASSIFIER_WEIGHTS = "classifier.json", "classifier.safetensors"  # written by `rlinf classifier`
TIMING_FILE = "timing.json"  # a robot's lateness, latencies and lost steps
PARTIAL_FILE = "result.partial.jsonl"  # written by rank 0; rank 2 writes to result.partial.2.jsonl
VIDEOS_FOLDER, RECORDINGS_FOLDER = "videos", "episodes"
STARTS_FOLDER = "starts"  # first images of a robot's episodes, which help an operator to reset the scene
ROBOT_EPISODES_FOLDER = "recorded"  # a robot's episodes before export to a dataset
BASELINE_FOLDER = "episodes_of_baseline"  # copies of the baseline's recordings, so that the folder can be moved
AUDIT_FILE, PARTIAL_AUDIT = "audit.json", "audit.partial"
CONDITIONS_FILE, RECORDS_FILE = "conditions.json", "records.npz"  # in an unfinished audit; the first also in eval/fresh

# Checkpoints
CHECKPOINTS_FOLDER, SAFETENSORS_FOLDER, FINAL_FOLDER = "checkpoints", "safetensors", "final"
STATE_FILE, TRAINER_FOLDER, RANDOM_FOLDER = "state.json", "trainer_state", "rng"
ROLLBACKS_FILE = "rollbacks.json"  # number of rollbacks to the checkpoint, and the halved trainer.learning_rate
MODEL_FOLDER, ADAPTER_FOLDER = "model", "adapter"
ADAPTER_FILE, FULL_FILE = "adapter_model.safetensors", "trained_in_full.safetensors"
STATISTICS_FILE = "dataset_statistics.json"
POLICY_FILE = "policy.json"  # constructor arguments that are not in config.json
ACTOR_SETTINGS, ACTOR_WEIGHTS = "actor.json", "actor.safetensors"
