import signal

import torch


class DistributedSignalHandler:
    def __init__(self, sig=signal.SIGTERM):
        self.sig = sig

    def signals_received(self):
        received = [torch.zeros(1, dtype=torch.int32) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(received, torch.tensor([self._signal_received], dtype=torch.int32))
        return [one.item() for one in received]

    def __enter__(self):
        self._signal_received = False

        def handler(signum, frame):
            self._signal_received = True

        signal.signal(self.sig, handler)
        return self
