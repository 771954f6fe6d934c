"""The two ends of a push of weights. Processes of tests import this file alone, which is quicker than a test with all that it needs."""

import os
import signal

import torch
from torch import nn

from rlinf.engines.weight_handle import WeightsRejectedError


class Net(nn.Module):
    def __init__(self, seed=0, width=24, frozen=True):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base = nn.Linear(width, 4 * width)
        self.head = nn.Linear(width, 3)
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("empty", torch.zeros(0, 3))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.base.requires_grad_(not frozen)


def serve(connection, receiver, die_at=0):
    """Answer commands until the other side is gone; die at the ``die_at``-th bucket."""
    num_loads = 0
    while True:
        try:
            command, payload = connection.recv()
        except (EOFError, OSError):
            return
        if command == "state":
            connection.send(("ok", {name: tensor.tolist() for name, tensor in receiver.module.state_dict().items()}))
            continue
        num_loads += command == "load"
        if command == "load" and num_loads == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            connection.send(("ok", getattr(receiver, command)(payload)))
        except WeightsRejectedError as error:
            connection.send(("error", error))


class Remote:
    """A receiver behind a connection; the sender dies before the ``die_at``-th bucket."""

    def __init__(self, connection, die_at=0):
        self.connection, self.die_at, self.num_loads = connection, die_at, 0

    def send(self, command, payload):
        self.num_loads += command == "load"
        if command == "load" and self.num_loads == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.connection.send((command, payload))

    def reply(self, command):
        status, answer = self.connection.recv()
        if status == "error":
            raise answer
        return answer
