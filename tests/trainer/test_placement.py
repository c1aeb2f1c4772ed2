"""Any placement: what is planned from settings, and runs whose roles live in other processes."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from tiny_runs import curve, weights, workspace

from verl.core.errors import ConfigError
from verl.trainer.config import load_run
from verl.trainer.placement import WITH_ACTOR, place

RAY = pytest.mark.skipif(__import__("importlib.util").util.find_spec("ray") is None, reason="ray is not installed")


def placed(gpus=0, ray=True, given=(), **settings):
    """PPO with an independent critic: every role has weights of its own."""
    sections = {"trainer": {"algorithm": "ppo", "placement": settings.pop("placement", "auto"),
                            "num_rollout_workers": settings.pop("workers", 1)},
                "model": {role: {"device_map": settings.get(role, "auto"), "model_name_or_path": "m"}
                          for role in ("actor", "critic", "reward_model")}}
    return place(load_run(data=sections).config, gpus, ray, given)


def far(p):
    return {role: group if group == WITH_ACTOR else str(group) for role, group in p.far.items()}


# -- planning ----------------------------------------------------------------------------------------------------------


def test_one_device_is_this_process():
    for gpus, device in ((0, "cpu"), (1, "cuda:0"), (8, "cuda:0")):
        p = placed(gpus)
        assert p.far == {} and set(p.here.values()) == {device} and not p.falls


def test_the_groups_of_the_field_on_four_gpus():
    p = placed(4, actor="cuda:0-1", reward_model="cuda:2", critic="cuda:3")
    assert far(p) == {"actor": "cuda:0,1", "reference": WITH_ACTOR, "rollout": WITH_ACTOR, "critic": "cuda:3"}
    assert p.here == {"reward_model": "cuda:2"} and not p.falls


def test_the_same_config_on_a_cpu_falls_back_with_a_line_each():
    p = placed(0, actor="cuda:0-1", reward_model="cuda:2", critic="cuda:3")
    assert p.far == {} and set(p.here.values()) == {"cpu"}
    assert [line.split(" is not here")[0] for line in p.falls] == [
        "model.actor.device_map: cuda:0-1", "model.critic.device_map: cuda:3", "model.reward_model.device_map: cuda:2"]


def test_roles_without_weights_of_their_own_have_no_processes():
    config = load_run(data={"trainer": {"algorithm": "ppo"}, "model": {"actor": {"device_map": "cuda:0-1", "lora": {"rank": 2}},
                                                                       "critic": {"device_map": "cuda:2-3"}}}).config
    p = place(config, 4, True)
    assert far(p) == {"actor": "cuda:0,1", "rollout": WITH_ACTOR}
    assert p.falls == ["model.critic.device_map: cuda:2-3: the critic is a value head on the actor and lives with it; for weights "
                       "of its own set model.critic.model_name_or_path"]


def test_workers_are_processes():
    assert far(placed(0, workers=4)) == {"rollout": "cpu*4"}
    assert far(placed(2, workers=2)) == {"rollout": "cuda:0,1"}
    assert far(placed(0, workers=3, placement={"rollout": "cpu"})) == {"rollout": "cpu*3"}
    with pytest.raises(ConfigError, match="workers: 4, but trainer.placement.rollout: cpu.2 names 2 devices"):
        placed(0, workers=4, placement={"rollout": "cpu*2"})


def test_placement_and_device_map_must_agree():
    assert far(placed(2, actor="cuda:0-1", placement={"actor": "cuda:0,1"}))["actor"] == "cuda:0,1"
    with pytest.raises(ConfigError, match="placement.actor: cuda:0 and model.actor.device_map: cuda:1 name different devices"):
        placed(2, actor="cuda:1", placement={"actor": "cuda:0"})
    with pytest.raises(ConfigError, match="'acter' is no role; did you mean 'actor'"):
        placed(placement={"acter": "cpu"})
    with pytest.raises(ConfigError, match="neither auto nor a mapping"):
        placed(placement="cuda:0-1")


def test_a_rollout_on_another_gpu_needs_a_process_and_on_the_actors_gpus_shares_theirs():
    assert far(placed(2, placement={"rollout": "cuda:1"})) == {"rollout": "cuda:1"}
    assert far(placed(2, placement={"rollout": "cuda:0"})) == {}
    assert far(placed(4, placement={"actor": "cuda:0-1", "rollout": "cuda:0-1"}))["rollout"] == WITH_ACTOR
    assert far(placed(4, placement={"actor": "cuda:0-1", "rollout": "cuda:2-3"}))["rollout"] == "cuda:2,3"
    assert far(placed(0, placement={"actor": "cpu*2", "rollout": "cpu"}))["rollout"] == "cpu*1"


def test_sharding_takes_the_gpus_that_are_free():
    config = load_run(data={"model": {"actor": {"use_fsdp": True}, "critic": {"device_map": "cuda:3"}}}).config
    p = place(config, 4, True)
    assert str(p.far["actor"]) == "cuda:0,1,2" and any("sharded over the 3 GPUs" in line for line in p.lines)


def test_a_model_that_one_gpu_cannot_hold_is_sharded(tmp_path):
    from transformers import LlamaConfig
    LlamaConfig(hidden_size=8192, num_hidden_layers=80, intermediate_size=28672, num_attention_heads=64,
                num_key_value_heads=8).save_pretrained(tmp_path)
    config = load_run(data={"model": {"actor": {"model_name_or_path": str(tmp_path)}}}).config
    p = place(config, 8, True)
    assert far(p) == {"actor": "cuda:0,1,2,3,4,5,6,7", "rollout": WITH_ACTOR}
    assert any("one GPU would need" in line for line in p.lines)


def test_without_ray_or_with_objects_everything_stays_here():
    p = placed(0, ray=False, workers=4)
    assert p.far == {} and "trainer.rollout.workers: 4" in p.falls[0] and "pip install ray" in p.falls[0]
    p = placed(0, given={"actor"}, placement={"actor": "cpu*2", "rollout": "cpu*2"})
    assert far(p) == {"rollout": "cpu*2"} and "given as an object" in p.falls[0]


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    workspace(folder)
    return folder


@pytest.fixture(scope="module")
def cluster():
    """Two nodes, each with processes of its own, as `ray start` makes them on two hosts; both named."""
    from ray.cluster_utils import Cluster
    os.environ.setdefault("RAY_worker_niceness", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "node_name": "first"})
    yield cluster, cluster.add_node(num_cpus=2, node_name="second")
    cluster.shutdown()


class Training:
    """`verl train` in a process, its output in a file."""

    def __init__(self, folder, cluster, out, *overrides):
        self.run, self.log = folder / out, folder / f"{out}.log"
        env = os.environ | {"OMP_NUM_THREADS": "1", "CI": "1"} | ({"RAY_ADDRESS": cluster.address} if cluster else {})
        with open(self.log, "w") as log:
            self.process = subprocess.Popen([sys.executable, "-m", "verl.cli.main", "train", str(folder / "run.yaml"), *overrides,
                                             f"trainer.output_dir={out}"], stdout=log, stderr=log, env=env, cwd=folder)

    @property
    def output(self):
        return self.log.read_text()

    def until_saved(self, limit_s=300):
        end = time.monotonic() + limit_s
        while not list(self.run.glob("checkpoints/step_*")):
            assert self.process.poll() is None and time.monotonic() < end, self.output
            time.sleep(0.05)

    def finish(self, limit_s=500):
        return self.process.wait(limit_s)

    def pids(self, role):
        """Of a role's processes, from the line that names them."""
        line, = re.findall(rf"^verl: {role}: (pid .*)$", self.output, re.M)
        return [int(pid) for pid in re.findall(r"pid (\d+)", line)]


@pytest.fixture(scope="module")
def reference(folder):
    """The run in one process."""
    training = Training(folder, None, "here")
    assert training.finish() == 0, training.output
    return training.run


def like(run, reference, atol=1e-4):
    here, there = weights(reference), weights(run)
    return here.keys() == there.keys() and all((here[n] - there[n]).abs().max() < atol for n in here)


@RAY
@pytest.mark.timeout(1200)
def test_two_trainings_share_a_cluster_and_each_equals_the_run_in_one_process(folder, cluster, reference):
    """One with sharded ranks and workers on both nodes, one with workers alone."""
    spread = Training(folder, cluster[0], "spread", "trainer.placement={actor: cpu*2, rollout: cpu*3}")
    beside = Training(folder, cluster[0], "beside", "trainer.num_rollout_workers=2")
    for training in (spread, beside):
        assert training.finish() == 0, training.output
        assert dict(curve(training.run)) == pytest.approx(dict(curve(reference)), rel=1e-4)
        assert like(training.run, reference)
    assert "actor: 2 processes of its own, cpu*2" in spread.output and "trainer.rollout.workers: 2" in beside.output
    pids = [*spread.pids("actor"), *spread.pids("rollout"), *beside.pids("rollout")]
    assert len(set(pids) - {os.getpid(), spread.process.pid, beside.process.pid}) == 2 + 3 + 2


SLOW = ("trainer.save.every=1", "trainer.rewards=[{function: my.py:slow_digits}]")


@RAY
@pytest.mark.timeout(1200)
def test_a_rank_that_dies_ends_the_run_with_its_name_and_the_same_command_resumes(folder, cluster, reference):
    command = (folder, cluster[0], "rank", "trainer.placement={actor: first/cpu*2}", *SLOW)
    training = Training(*command)
    training.until_saved()
    victim = training.pids("actor")[1]
    os.kill(victim, signal.SIGKILL)
    assert training.finish() != 0 and re.search(rf"rank 1 \(pid {victim} on .*died", training.output), training.output
    assert training.pids("rollout") == training.pids("actor")
    again = Training(*command)
    assert again.finish() == 0 and "resuming after step" in again.output, again.output
    assert like(again.run, reference)


@RAY
@pytest.mark.timeout(1200)
def test_a_critic_and_a_reward_model_elsewhere_change_no_number(folder, cluster):
    ppo = ("trainer.algorithm=ppo", "trainer.rewards=[]", "trainer.steps=2", "model.critic.model_name_or_path=./model",
           "model.reward_model.model_name_or_path=./model")
    here = Training(folder, None, "ppo_here", *ppo)
    away = Training(folder, cluster[0], "ppo_away", *ppo, "trainer.placement={critic: second/cpu*1, reward_model: cpu*2}")
    for training in (here, away):
        assert training.finish() == 0, training.output
    for name in ("reward", "kl"):
        assert dict(curve(away.run, name)) == pytest.approx(dict(curve(here.run, name)), rel=1e-3, abs=1e-6)
    assert like(away.run, here.run) and len(away.pids("critic")) == 1


@RAY
@pytest.mark.timeout(1200)
def test_a_node_that_dies_costs_its_workers_and_the_run_goes_on(folder, cluster, reference):
    training = Training(folder, cluster[0], "node", "trainer.placement={rollout: first/cpu*1+second/cpu*2}", *SLOW)
    training.until_saved()
    cluster[0].remove_node(cluster[1], allow_graceful=False)
    assert training.finish() == 0, training.output
    lost = set(re.findall(r"rollout rank \d \(pid (\d+) on [^)]*\) died", training.output))
    assert lost and lost <= {str(pid) for pid in training.pids("rollout")[1:]}
    assert like(training.run, reference)
