"""Processes on other cores, GPUs and hosts: Ray actors that each hold one object, and calls to its methods.

Knows no engine. Every wait is bounded; a process that dies, hangs or raises is a typed error that names role, rank, pid, node
and the first line of what went wrong. Importing this module imports Ray: only what needs other processes does.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.core.errors import CapacityError, ConfigError, VerlError, WorkerError
from verl.flow.devices import Device, DeviceGroup

CPU_SHARE = 0.25  # of a core, reserved for one CPU process: four small models sample on one core, and no cluster is overbooked
PLACE_S, CALL_S = 300.0, 600.0  # the longest waits for room in the cluster, and for an answer
STARTS = 3  # attempts to start Ray, which a busy machine may need
GRACE_S = 1.0  # between an error and the news that a process has died
_NAMESPACE = "verl"
_TICKETS = count(1)


# -- in the other process ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Raised:
    """An exception on its way to the caller. `error` is itself one of verl's, which keep their type."""

    line: str
    trace: str
    error: VerlError | None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _tried(function: Callable, *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return _Raised(f"{type(error).__name__}: {_first_line(error)}", traceback.format_exc(),
                       error if isinstance(error, VerlError) else None)


class _Host:
    """Holds objects. Their work runs in one thread, one call after the other; what may run beside that has other threads."""

    def __init__(self):
        self.objects: dict[str, Any] = {}
        self.lines: dict[int, queue.SimpleQueue] = defaultdict(queue.SimpleQueue)

    @ray.method(concurrency_group="work")
    def build(self, key: str, make: Callable[[], Any]) -> Any:
        def made() -> tuple[int, str]:
            self.objects[key] = make()
            return os.getpid(), os.uname().nodename
        return _tried(made)

    @ray.method(concurrency_group="work")
    def call(self, key: str, name: str, args: tuple) -> Any:
        return _tried(lambda: getattr(self.objects[key], name)(*args))

    @ray.method(concurrency_group="side")
    def beside(self, key: str, name: str, args: tuple) -> Any:
        return _tried(lambda: getattr(self.objects[key], name)(*args))

    @ray.method(concurrency_group="work")
    def stream(self, key: str, ticket: int, name: str, args: tuple) -> None:
        line = self.lines[ticket]
        line.put((True, _tried(lambda: getattr(self.objects[key], name)(*args, emit=lambda item: line.put((False, item))))))

    @ray.method(concurrency_group="side")
    def take(self, ticket: int, wait_s: float) -> list[tuple[bool, Any]]:
        """What the stream has put out so far, waiting up to `wait_s` for the first of it; (True, result) ends it."""
        line, got = self.lines[ticket], []
        with contextlib.suppress(queue.Empty):
            got.append(line.get(timeout=wait_s))
            while True:
                got.append(line.get_nowait())
        if got and got[-1][0]:
            del self.lines[ticket]
        return got


_Remote = ray.remote(concurrency_groups={"work": 1, "side": 4}, max_restarts=0)(_Host)


# -- in the driver -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slot:
    """Room for one process: a bundle of the run's placement group, and the environment of the process."""

    device: Device
    group: PlacementGroup
    bundle: int
    gpu_share: float
    name: str | None  # a GPU's process takes a name that only one run can have
    env: Mapping[str, str]


class Actor:
    """One process and the object in it. The constructor returns at once; `ready` waits for the object.

    make: a picklable function without arguments that makes the object, in the process. within: another Actor, whose process
    this object shares.
    """

    def __init__(self, slot: Slot, role: str, rank: int, make: Callable[[], Any], within: Actor | None = None):
        self.slot, self.role, self.rank, self.within = slot, role, rank, within
        self.pid: int | None = None
        self.node = str(slot.device)
        self.dead: WorkerError | None = None
        self._host = within._host if within is not None else self._process()
        self.built = self._host.build.remote(role, make)

    def _process(self) -> Any:
        slot = self.slot
        strategy = PlacementGroupSchedulingStrategy(slot.group, placement_group_bundle_index=slot.bundle)
        try:
            return _Remote.options(
                num_cpus=CPU_SHARE, num_gpus=slot.gpu_share, scheduling_strategy=strategy, runtime_env={"env_vars": dict(slot.env)},
                name=slot.name, namespace=_NAMESPACE if slot.name else None).remote()
        except ValueError as error:
            raise CapacityError(f"{self.role} rank {self.rank} was given {slot.device}, where another run's process is at work "
                                f"({error}); give the two runs different GPUs") from error

    @property
    def who(self) -> str:
        """Role, rank and process, for people."""
        return f"{self.role} rank {self.rank} (" + (f"pid {self.pid} on {self.node})" if self.pid else f"starting on {self.node})")

    def started(self) -> bool:
        """Whether `ready` would return (or raise) at once."""
        return bool(ray.wait([self.built], timeout=0)[0])

    def ready(self, deadline_s: float = CALL_S) -> Actor:
        """Wait until the object is made. Raises its error, or WorkerError."""
        if self.pid is None:
            self.pid, self.node = self._get(self.built, deadline_s, "start")
        return self

    def start(self, name: str, *args: Any, beside: bool = False) -> Call:
        """Begin a call; `beside`: now, although another one may be at work."""
        method = self._host.beside if beside else self._host.call
        return Call(self, name, method.remote(self.role, name, args))

    def call(self, name: str, *args: Any, deadline_s: float = CALL_S, beside: bool = False) -> Any:
        """The result of a method of the object. Raises what it raised when that is a VerlError, else WorkerError."""
        return self.start(name, *args, beside=beside).result(deadline_s)

    def stream(self, name: str, *args: Any) -> Stream:
        """Begin a call of a method that also takes `emit`, and calls it with partial results."""
        ticket = next(_TICKETS)
        self._host.stream.remote(self.role, ticket, name, args)
        return Stream(self, name, ticket)

    def kill(self) -> None:
        """End the process now, unless it is another's."""
        self.dead = self.dead or WorkerError(f"{self.who} was ended")
        if self.within is None:
            with contextlib.suppress(RayError):
                ray.kill(self._host)

    def _get(self, ref: ray.ObjectRef, timeout_s: float, what: str) -> Any:
        try:
            value = ray.get(ref, timeout=max(timeout_s, 0.001))
        except GetTimeoutError:
            raise WorkerError(f"{self.who} did not answer {what!r} within {timeout_s:g} s") from None
        except RayTaskError as error:  # outside of the object: arguments that could not be read there, most often
            raise WorkerError(f"{self.who}: {what}: {_first_line(error.cause or error)}") from error
        except RayError as error:
            self.dead = self.dead or WorkerError(f"{self.who} died: {_reason(error)}")
            raise self.dead from None
        return self._value(value)

    def _value(self, value: Any) -> Any:
        if not isinstance(value, _Raised):
            return value
        error = value.error if value.error is not None else WorkerError(f"{self.who}: {value.line}")
        error.add_note(f"In {self.who}:\n{value.trace}")
        raise error


@dataclass(slots=True)
class Call:
    """A call under way."""

    actor: Actor
    name: str
    ref: ray.ObjectRef

    def result(self, deadline_s: float = CALL_S) -> Any:
        """Wait for the result; see Actor.call for what it raises."""
        return self.actor._get(self.ref, deadline_s, self.name)


@dataclass(slots=True)
class Stream:
    """A call under way that puts out partial results."""

    actor: Actor
    name: str
    ticket: int
    ref: ray.ObjectRef | None = None
    ended: bool = False
    result: Any = None

    def take(self) -> list[Any]:
        """Partial results that are there; after the last, `ended` is true and `result` set. Raises as Actor.call does."""
        if self.ended or self.ref is None or not ray.wait([self.ref], timeout=0)[0]:
            return []
        ref, self.ref = self.ref, None
        try:
            got = self.actor._get(ref, CALL_S, self.name)
            if got and got[-1][0]:
                self.ended = True
                self.result = self.actor._value(got.pop()[1])
        except VerlError:
            self.ended = True
            raise
        return [item for _, item in got]


def wait_any(streams: Sequence[Stream], timeout_s: float) -> None:
    """Return as soon as one of the streams has something to take, at the latest after `timeout_s`."""
    for s in streams:
        if s.ref is None and not s.ended:
            s.ref = s.actor._host.take.remote(s.ticket, 1.0)
    refs = [s.ref for s in streams if s.ref is not None]
    if refs:
        ray.wait(refs, num_returns=1, timeout=timeout_s)
    else:
        time.sleep(timeout_s)


def broadcast(actors: Sequence[Actor], name: str, *args: Any) -> list[Call]:
    """Begin the same call on all of them; the arguments are stored once."""
    shared = ray.put(args)
    return [Call(a, name, a._host.call.remote(a.role, name, shared)) for a in actors]


def gather(calls: Sequence[Call], deadline_s: float = CALL_S) -> list[Any]:
    """Results of all calls, in their order. The first error is raised as soon as it is there, whatever the others do: where a
    process has died, its death, and not what another one saw of it."""
    until, results = time.monotonic() + deadline_s, {}
    waiting = {call.ref: call for call in calls}
    while waiting:
        done, _ = ray.wait(list(waiting), num_returns=1, timeout=max(until - time.monotonic(), 0))
        for ref in done or list(waiting):
            call = waiting.pop(ref)
            try:
                results[ref] = call.actor._get(ref, deadline_s if done else 0.0, call.name)
            except VerlError as error:
                raise _death(waiting) or error from None
    return [results[call.ref] for call in calls]


def _death(waiting: Mapping[ray.ObjectRef, Call]) -> VerlError | None:
    """The error of a process among these that has just died."""
    done, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=GRACE_S) if waiting else ((), ())
    for ref in done:
        with contextlib.suppress(VerlError):
            waiting[ref].actor._get(ref, GRACE_S, waiting[ref].name)
    return next((call.actor.dead for call in waiting.values() if call.actor.dead is not None), None)


def _reason(error: RayError) -> str:
    """The sentence of Ray's report that says why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = next((line for line in lines if line.startswith("The actor is dead because")), lines[0] if lines else repr(error))
    return line.partition(" Some common causes")[0].removesuffix(".")


@dataclass
class Cluster:
    """Ray, joined (RAY_ADDRESS, or a session this process is in already) or started on this host alone and ended by `close`."""

    owned: bool = field(init=False, default=False)
    groups: list[PlacementGroup] = field(init=False, default_factory=list)

    def __post_init__(self):
        if not ray.is_initialized():
            self.owned = "RAY_ADDRESS" not in os.environ
            os.environ.setdefault("RAY_worker_niceness", "0")  # the work is done in the workers
            where = {"address": "local", "include_dashboard": False} if self.owned else {"address": os.environ["RAY_ADDRESS"]}
            for left in reversed(range(STARTS)):
                try:
                    ray.init(**where, log_to_driver=False, logging_level="ERROR")
                    return
                except Exception as error:  # Ray has no type of its own for these; it gives a node half a minute to start
                    ray.shutdown()
                    if not left:
                        raise WorkerError(f"Ray could not be {'started' if self.owned else 'joined at ' + where['address']}: "
                                          f"{_first_line(error)}") from error

    @property
    def address(self) -> str:
        """This process' host, as the others reach it."""
        return ray.util.get_node_ip_address()

    def place(self, roles: Mapping[str, DeviceGroup], deadline_s: float = PLACE_S) -> dict[str, list[Slot]]:
        """Reserve room for all processes of all roles at once: everything or nothing, so that two runs cannot block each other.

        Raises ConfigError for a host that is not there, CapacityError when the cluster is too small, or stays full.
        """
        bundles, selectors, places, shares = [], [], {}, Counter()
        for role, group in roles.items():
            for rank, d in enumerate(group.devices):
                node = self._node(d, f"placement of {role}")
                key = (role, rank) if d.gpu is None else (node["NodeID"], d.gpu)
                if key not in places:
                    places[key] = len(bundles)
                    bundles.append({"CPU": 0.0} if d.gpu is None else {"CPU": 0.0, "GPU": 1.0})
                    selectors.append({} if node is None else {"ray.io/node-id": node["NodeID"]})
                bundles[places[key]]["CPU"] += CPU_SHARE
                shares[key] += 1
        group = self._reserve(bundles, selectors, deadline_s)
        processes = sum(len(g) for g in roles.values())
        threads = str(max(1, torch.get_num_threads() // processes))
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)  # modules that the caller finds are found there
        used, slots = Counter(), {}
        for role, devices in roles.items():
            slots[role] = []
            for rank, d in enumerate(devices.devices):
                node = self._node(d, role)
                key = (role, rank) if d.gpu is None else (node["NodeID"], d.gpu)
                name = None if d.gpu is None else f"{node['NodeID']}/cuda:{d.gpu}/{used[key]}"
                used[key] += 1
                slots[role].append(Slot(d, group, places[key], 0.0 if d.gpu is None else 1 / shares[key], name,
                                        {"OMP_NUM_THREADS": threads, "PYTHONPATH": path} | _gpu_environment(d)))
        return slots

    def _reserve(self, bundles: list[dict[str, float]], selectors: list[dict[str, str]], deadline_s: float) -> PlacementGroup:
        need, have = Counter(), ray.cluster_resources()
        for bundle in bundles:
            need.update(bundle)
        words = ", ".join(f"{need[k]:g} {k} (the cluster has {have.get(k, 0):g})" for k in need)
        if any(need[k] > have.get(k, 0) for k in need):
            raise CapacityError(f"the run's processes need {words}; a CPU process takes {CPU_SHARE:g} of a core. Ask for fewer "
                                "processes, or join a larger cluster (RAY_ADDRESS)")
        group = placement_group(bundles, strategy="SPREAD", bundle_label_selector=selectors)
        if not group.wait(timeout_seconds=deadline_s):
            free = ray.available_resources()
            remove_placement_group(group)
            raise CapacityError(f"the run's processes need {words}, but only {', '.join(f'{free.get(k, 0):g} {k}' for k in need)} "
                                f"became free within {deadline_s:g} s: other runs hold the rest")
        self.groups.append(group)
        return group

    def _node(self, device: Device, setting: str) -> dict[str, Any] | None:
        """Where a device is: the node of that name or address, this one for a GPU without host, any for a CPU without."""
        if device.host is None and device.gpu is None:
            return None
        alive = [n for n in ray.nodes() if n["Alive"]]
        if device.host is None:
            return next(n for n in alive if n["NodeID"] == ray.get_runtime_context().get_node_id())
        names = [{n["NodeName"], n["NodeManagerHostname"], n["NodeManagerAddress"]} for n in alive]
        for node, own in zip(alive, names):
            if device.host in own:
                return node
        raise ConfigError(f"{setting}: there is no host {device.host!r} in the cluster; its hosts are "
                          f"{', '.join('/'.join(sorted(own)) for own in names)}")

    def close(self) -> None:
        """Give the room back, which ends the processes; end Ray when it was started here."""
        for group in self.groups:
            with contextlib.suppress(RayError):
                remove_placement_group(group)
        self.groups.clear()
        if self.owned and ray.is_initialized():
            ray.shutdown()


def _gpu_environment(device: Device) -> dict[str, str]:
    """The one GPU the process sees (Ray counts GPUs, but the numbers are those that were written)."""
    if device.gpu is None:
        return {"CUDA_VISIBLE_DEVICES": ""}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if device.host is None else None
    number = visible.split(",")[device.gpu] if visible else str(device.gpu)
    return {"CUDA_VISIBLE_DEVICES": number, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
