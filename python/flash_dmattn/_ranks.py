"""A process group as its ranks see it: how they agree before a call, and how they exchange tensors.

Ranks first compare their arguments through the store of torch.distributed, from host to host. So if
a rank disagrees, raises or stays away, the call ends with an error on every rank before any of them
waits in a collective operation. The comparison waits for no device.
"""

from __future__ import annotations

import json
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Iterable, Mapping

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ._types import refusal

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# PyTorch 2.13 renames it.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
PROBE = timedelta(milliseconds=50)  # how long has() waits
LENGTH = "length"  # the only setting in which ranks may differ
FAILED = "failed"  # sent instead of settings: why a rank refused its arguments


class Ranks:
    """The ranks of a process group, and the rank of this process."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = weakref.ref(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        # gloo sends only from host memory
        self.through_host = "nccl" not in dist.get_backend_config(group)
        store = distributed_c10d._get_default_store()
        self.timeout = timeout_of(group, store)
        # Keys differ between groups without a common rank, and between a group and one made anew.
        members = ",".join(map(str, dist.get_process_group_ranks(group)))
        prefix = f"flash_dmattn/{group.group_name}/{members}"
        made = (store.add(f"{prefix}/ranks", 1) - 1) // self.size
        self.store: Any = dist.PrefixStore(f"{prefix}/{made}", own_client(store))
        self.calls = 0  # compared by the ranks so far

    def process_group(self) -> dist.ProcessGroup:
        """The process group, while it exists.

        Raises:
            RuntimeError: it has been destroyed. (torch.distributed would take the default group.)
        """
        group = self.group()
        if group is None:
            raise RuntimeError("group: the process group has been destroyed")
        return group

    # ---- From host to host ----

    def compare(self, settings: Mapping[str, Any]) -> list[int]:
        """The length of each rank. All other settings have to be the same on all ranks.

        Raises:
            ValueError: settings differ, or another rank has refused its arguments.
            RuntimeError: a rank made no such call within the timeout of the process group.
        """
        found = [json.loads(text) for text in self.post(settings)]
        refused = [f"rank {n}: {one[FAILED]}" for n, one in enumerate(found) if FAILED in one]
        if refused:
            raise ValueError("; ".join(refused))
        names = dict.fromkeys(name for one in found for name in one if name != LENGTH)
        unlike = [name for name in names if len({str(one.get(name)) for one in found}) > 1]
        if unlike:
            raise ValueError("; ".join(describe(name, found) for name in unlike))
        return [one[LENGTH] for one in found]

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks that this one has refused its arguments."""
        self.post({FAILED: str(error)})

    def post(self, settings: Mapping[str, Any]) -> list[str]:
        """The texts of all ranks for this call, in the order of ranks."""
        call, self.calls = self.calls, self.calls + 1
        keys = [f"{call}/{rank}" for rank in range(self.size)]
        own = keys[self.rank]
        try:
            self.store.set(own, json.dumps(settings, default=str))
            texts = [text.decode() for text in self.read(keys)]
            if call > 0:  # all ranks have begun this call, so all have read it
                self.store.delete_key(f"{call - 1}/{self.rank}")
        except Exception as error:
            message = self.describe_absent(keys)
            if self.has(own):  # tells a rank that comes later that this one gave up
                self.store.set(own, json.dumps({FAILED: message}))
            raise RuntimeError(message) from error
        return texts

    def read(self, keys: list[str]) -> list[bytes]:
        """The values of all keys, once all exist."""
        if self.timeout != self.store.timeout:
            self.store.wait(keys, self.timeout)
        if self.store.has_extended_api():
            return self.store.multi_get(keys)
        return [self.store.get(key) for key in keys]

    def describe_absent(self, keys: list[str]) -> str:
        absent = [rank for rank, key in enumerate(keys) if not self.has(key)]
        if self.rank in absent:  # it cannot read its own text
            return "group: the store of the process group is gone, with the process that had it"
        seconds = self.timeout.total_seconds()
        if not absent:
            return (
                f"group: a rank made its call of flash_dmattn later than {seconds:g} s after others"
            )
        return f"group: {list_ranks(absent)} made no call of flash_dmattn within {seconds:g} s"

    def has(self, key: str) -> bool:
        try:
            self.store.wait([key], PROBE)
        except Exception:
            return False
        return True

    # ---- Between devices ----

    def gather(self, own: torch.Tensor) -> Transfer:
        """Begin to gather a tensor of the same shape from all ranks into [ranks, ...]."""
        sent = self.on_transport(own).flatten()
        received = sent.new_empty(self.size * sent.numel())
        work = all_gather(received, sent, group=self.process_group(), async_op=True)
        return Transfer(work, sent, received, own.device, (self.size, *own.shape))

    def exchange(
        self,
        sent: torch.Tensor,
        sent_counts: list[int],
        received_counts: list[int],
        shape: tuple[int, ...],
    ) -> Transfer:
        """Begin an all-to-all exchange. `sent` has sent_counts[n] rows for each rank n, which sends
        received_counts[n] rows; both are in the order of ranks. The rows received make a tensor of
        `shape`.
        """
        device, sent = sent.device, self.on_transport(sent).contiguous()
        received = sent.new_empty((sum(received_counts), *sent.shape[1:]))
        counts, group = (received_counts, sent_counts), self.process_group()
        work = dist.all_to_all_single(received, sent, *counts, group=group, async_op=True)
        return Transfer(work, sent, received, device, shape)

    def on_transport(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in memory from which the process group can send it."""
        return tensor.cpu() if self.through_host else tensor

    def pass_on(self, sent: list[torch.Tensor], shapes: list[tuple[int, ...]]) -> Passing:
        """Begin to send tensors to the next rank, and to receive tensors of these shapes from the
        previous one: the ranks form a ring."""
        return Passing(self, sent, shapes)


class Transfer:
    """The tensor that this rank receives in a collective operation that has begun."""

    def __init__(
        self,
        work: dist.Work,
        sent: torch.Tensor,
        received: torch.Tensor,
        device: torch.device,
        shape: tuple[int, ...],
    ) -> None:
        self.work, self.sent = work, sent  # `sent` is read until wait()
        self.received, self.device, self.shape = received, device, shape

    def wait(self) -> torch.Tensor:
        """The received tensor. The current stream waits with NCCL, the host with gloo."""
        self.work.wait()
        return self.received.view(self.shape).to(self.device)


class Passing:
    """Tensors on their way from one rank to the next."""

    def __init__(
        self, ranks: Ranks, sent: list[torch.Tensor], shapes: list[tuple[int, ...]]
    ) -> None:
        self.device, group = sent[0].device, ranks.process_group()
        following, before = (
            dist.get_global_rank(group, (ranks.rank + step) % ranks.size) for step in (1, -1)
        )
        # Kept until wait(), because the operations read them.
        self.sent = [ranks.on_transport(one).contiguous() for one in sent]
        if ranks.size == 1:
            self.received, self.works = self.sent, []
            return
        self.received = [one.new_empty(shape) for one, shape in zip(self.sent, shapes)]
        # All ranks have to take part in the first operations of a group, so a rank without tokens
        # sends an element that is not read.
        pairs = ((dist.isend, self.sent, following), (dist.irecv, self.received, before))
        operations = [
            dist.P2POp(run, one if one.numel() else one.new_zeros(1), peer, group)
            for run, tensors, peer in pairs
            for one in tensors
        ]
        self.works = dist.batch_isend_irecv(operations)
        self.operations = operations  # their tensors are in use until wait()

    def wait(self) -> list[torch.Tensor]:
        for work in self.works:
            work.wait()
        return [one.to(self.device) for one in self.received]


known: weakref.WeakKeyDictionary[dist.ProcessGroup, Ranks] = weakref.WeakKeyDictionary()


def ranks_of(group: dist.ProcessGroup | DeviceMesh | None) -> Ranks:
    """The ranks of a process group or of a mesh of one dimension; None for all processes.

    Raises:
        RuntimeError: torch.distributed has no process group.
        TypeError: `group` is something else.
        ValueError: a mesh of more dimensions, or a group without this process.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "group: torch.distributed has no process group, call "
            "torch.distributed.init_process_group() first"
        )
    mesh: Any = group
    if hasattr(mesh, "get_group"):
        if mesh.ndim != 1:
            raise ValueError(f"group: is a mesh of {mesh.ndim} dimensions, want one of them")
        group = mesh.get_group()
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: does not have this process as a rank")
    if not isinstance(group, dist.ProcessGroup):
        raise refusal("group", group, "a ProcessGroup, a DeviceMesh or None")
    found = known.get(group)
    if found is None:
        found = known[group] = Ranks(group)
    return found


def own_client(store: Any) -> Any:
    """A second connection to the store, if PyTorch can make one. While the ranks of a group wait
    for each other on it, other users of the store do not wait."""
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        return store


def timeout_of(group: dist.ProcessGroup, store: Any) -> timedelta:
    for device in ("cuda", "cpu"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (AttributeError, RuntimeError):  # no such backend, or PyTorch does not tell
            continue
    return store.timeout


def list_ranks(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def describe(name: str, found: list[dict[str, Any]]) -> str:
    owners: dict[str, list[int]] = {}
    for rank, settings in enumerate(found):
        owners.setdefault(str(settings.get(name)), []).append(rank)
    values = ", ".join(f"{value} on {list_ranks(ranks)}" for value, ranks in owners.items())
    return f"{name}: is {values}, want the same on all ranks of the group"
