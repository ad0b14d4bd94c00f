"""Starts real processes that communicate over gloo, for tests of distributed models.

Processes are forked, so that to start a few takes no time: imports take longer than most tests.
"""

import multiprocessing
import os
import pickle
import threading
import time
import traceback

import torch
import torch.distributed as dist

from .models import llama, noisy_copy

_to_test = []  # the pipe of a process to its test
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}


class Processes:
    """Processes that run `function(*arguments)` at the same time, as ranks of one group.

    Args:
        count: how many.
        folder: where they meet.
        function: what each of them runs; its result must be picklable.
        arguments: of the function.
        backend: of their communication.
    """

    def __init__(self, count, folder, function, *arguments, backend="gloo"):
        self.pipes, self.processes = [], []
        # A process with threads is not forked: locks that they hold would never be released. The thread that waits for
        # slow progress bars holds none.
        others = [each for each in threading.enumerate() if each.name not in ("MainThread", "tqdm_monitor")]
        context = multiprocessing.get_context("spawn" if others or backend == "nccl" else "fork")
        meeting = str(folder / f"meeting{time.monotonic_ns()}")
        for rank in range(count):
            ours, theirs = context.Pipe()
            # Plain bytes: torch would share the memory of tensors, which goes with the process.
            given = pickle.dumps(arguments)
            process = context.Process(target=_run, args=(rank, count, meeting, backend, theirs, function, given))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def results(self, seconds=120):
        """Return what the function returned in each process."""
        found = self.outcomes(seconds)
        for outcome in found:
            assert outcome is not None and outcome[0] == "result", outcome and outcome[1]
        return [value for _, value in found]

    def outcomes(self, seconds=120):
        """Return ("result", value) or ("error", traceback) of each process; None for one that was killed."""
        try:
            return [self._outcome(pipe, seconds) for pipe in self.pipes]
        finally:
            for process in self.processes:
                process.kill()
                process.join()

    def _outcome(self, pipe, seconds):
        if not pipe.poll(seconds):
            return "error", "it hangs"
        try:
            return pickle.loads(pipe.recv_bytes())
        except EOFError:
            return None

    def wait_for(self, rank):
        """Wait until a process has called `tell`, and return its message."""
        assert self.pipes[rank].poll(60)
        return pickle.loads(self.pipes[rank].recv_bytes())


def _run(rank, count, meeting, backend, pipe, function, arguments):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ["HF_SPECBRANCH_CACHE"] = "off"
    torch.set_num_threads(1)
    _to_test.append(pipe)
    try:
        dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=count)
        outcome = "result", function(*pickle.loads(arguments))
        dist.barrier()
    except BaseException:
        outcome = "error", traceback.format_exc()
    tell(outcome)
    os._exit(0)  # without waiting for the others


def tell(message):
    """Send a message to the test, from within a process."""
    _to_test[-1].send_bytes(pickle.dumps(message))


def saved_pair(folder, seed=0):
    """Save a small target whose heads can be sharded in four; return its folder, itself, and a draft."""
    target = llama(seed, **HEADS)
    target.save_pretrained(folder / "target")
    return str(folder / "target"), target, noisy_copy(target, noise=0.2, seed=1)


def load_sharded(folder):
    """Load a target that is sharded over all processes."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    processes = DistributedConfig(tp_size=dist.get_world_size())
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=processes).eval()
