"""Public import path for the token-policy interfaces in ``rlinf.llm``."""

from rlinf.imports import lazy_attributes

__getattr__ = lazy_attributes(
    __name__,
    {
        "BatchedDataDict": "rlinf.llm.batched_data_dict",
        "GenerationConfig": "rlinf.llm.generation_interface",
        "GenerationDatumSpec": "rlinf.llm.generation_interface",
        "GenerationInterface": "rlinf.llm.generation_interface",
        "GenerationOutputSpec": "rlinf.llm.generation_interface",
        "LogprobsSpec": "rlinf.llm.policy_interface",
        "LossFunction": "rlinf.llm.policy_interface",
        "PolicyInterface": "rlinf.llm.policy_interface",
        "TrainingDatumSpec": "rlinf.llm.policy_interface",
        "verify_right_padding": "rlinf.llm.batch_checks",
    },
)
