"""A copy of a policy that a different process trains: the base class of all rollout workers."""

from rlinf.engines.weight_handle import WeightsHandle
from rlinf.engines.weight_transfer import ModuleReceiver, PushHeader
from rlinf.errors import RLinfError
from rlinf.rollout.policy_skeleton import PolicySkeleton


class PolicyReplica:
    """A policy with the weights of the last push, built from its skeleton."""

    def __init__(self, shell: PolicySkeleton, device: str) -> None:
        self.model = shell.build(device)
        self.receiver = ModuleReceiver(self.model)

    @property
    def version(self) -> int | None:
        """Version of the weights; None after no push or an incomplete one."""
        return self.receiver.version

    def start_push(self, header: PushHeader) -> None:
        """Prepare for the weights of a version; see ``WeightReceiver``. The policy cannot act until ``commit``."""
        self.receiver.start_push(header)

    def load(self, bucket: WeightsHandle) -> None:
        """Load a bucket of weights."""
        self.receiver.load(bucket)

    def commit(self) -> int:
        """End a push; return its version."""
        return self.receiver.commit()

    def close(self) -> None:
        """Free its resources."""

    def _held(self) -> int:
        """Return the version of the weights; raise RLinfError if a push is missing or incomplete."""
        if self.version is None:
            raise RLinfError(
                "A rollout worker has no complete weights: no push has ended, or the last one was rejected. Push again"
            )
        return self.version
