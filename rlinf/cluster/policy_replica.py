"""The base class of rollout workers: a copy of a policy that is trained in a different process."""

from rlinf.engines.weight_handle import WeightsHandle
from rlinf.engines.weight_transfer import ModuleReceiver, PushHeader
from rlinf.errors import RLinfError
from rlinf.rollout.policy_skeleton import PolicySkeleton


class PolicyReplica:
    """A policy built from its skeleton, with the most recently pushed weights."""

    def __init__(self, shell: PolicySkeleton, device: str) -> None:
        self.model = shell.build(device)
        self.receiver = ModuleReceiver(self.model)

    @property
    def version(self) -> int | None:
        """Version of the weights, or None before the first push or after an incomplete one."""
        return self.receiver.version

    def start_push(self, header: PushHeader) -> None:
        """Prepare to receive a version of the weights; see ``WeightReceiver``. The policy cannot act until ``commit``."""
        self.receiver.start_push(header)

    def load(self, bucket: WeightsHandle) -> None:
        """Load a bucket of weights."""
        self.receiver.load(bucket)

    def commit(self) -> int:
        """Complete a push and return its version."""
        return self.receiver.commit()

    def close(self) -> None:
        """Release the worker's resources."""

    def _held(self) -> int:
        """Return the version of the weights; raise RLinfError if no push has completed."""
        if self.version is None:
            raise RLinfError(
                "A rollout worker has no complete weights: no push has completed, or the last one was rejected. Push again"
            )
        return self.version
