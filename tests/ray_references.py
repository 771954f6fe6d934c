"""The references of this process that Ray counts."""

import gc
import time

SECONDS = 60.0
"""Ray tells the owner of an object late that nobody else refers to it."""


def counted() -> set[str]:
    """Return the ids of all objects to which this process or a borrower of it refers."""
    import ray

    counts = ray._private.worker.global_worker.core_worker.get_all_reference_counts()
    return {each if isinstance(each, str) else each.decode() for each in counts}


def is_freed(ref_id: str) -> bool:
    """Return whether Ray forgets an object, to which it may take some time."""
    gc.collect()
    deadline = time.monotonic() + SECONDS
    while ref_id in counted() and time.monotonic() < deadline:
        time.sleep(0.1)
    return ref_id not in counted()
