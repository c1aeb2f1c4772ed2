"""Killed anywhere, resumed, equal to the uninterrupted run bit for bit."""

import json
import signal

import pytest
import torch
from tiny_runs import curve, verl, verl_until, weights, workspace

ARGS = ["trainer.steps=6", "trainer.save.every=2", "trainer.sampling.max_tokens=24"]
PPO = ["trainer.algorithm=ppo", "trainer.train_batch_size=8", "trainer.ppo_epochs=2", "trainer.algo.kl_target=0.02"]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return str(workspace(tmp_path_factory.mktemp("resume")))


def same(a, b) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("extra", [[], PPO], ids=["grpo", "ppo"])
def test_sigkill_in_mid_generation_then_resume_equals_the_uninterrupted_run(config, tmp_path, extra):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert verl("train", config, *ARGS, *extra, f"trainer.output_dir={whole}").returncode == 0
    journal = killed / "progress.journal"
    slow = [*ARGS, *extra, f"trainer.output_dir={killed}", "trainer.rewards=[{function: 'my.py:digits'}]"]

    def in_step_four() -> bool:
        """Some samples of the step after checkpoint 2 (or later) are finished, others are being generated."""
        done = curve(killed) if (killed / "metrics.jsonl").exists() else []
        return bool(done) and done[-1][0] >= 3 and journal.exists() and journal.stat().st_size > 3000

    code, out = verl_until("train", config, *slow, ready=in_step_four, sig=signal.SIGKILL)
    assert code == -signal.SIGKILL, out
    resumed = verl("train", config, *slow)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming after step" in resumed.stdout and "finished samples of the interrupted step are kept" in resumed.stdout
    same(weights(whole), weights(killed))
    assert curve(whole) == curve(killed)
    assert curve(whole, "loss") == curve(killed, "loss")


def test_resume_with_more_steps_equals_one_long_run(config, tmp_path):
    long, short = tmp_path / "long", tmp_path / "short"
    assert verl("train", config, "trainer.steps=5", f"trainer.output_dir={long}").returncode == 0
    assert verl("train", config, "trainer.steps=2", f"trainer.output_dir={short}").returncode == 0
    assert verl("train", config, "trainer.steps=5", f"trainer.output_dir={short}").returncode == 0
    same(weights(long), weights(short))
    assert curve(long) == curve(short)


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_same_command_goes_on(config, tmp_path, sig):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    args = ["trainer.steps=8", "trainer.save.every=0"]
    assert verl("train", config, *args, f"trainer.output_dir={whole}").returncode == 0
    code, out = verl_until("train", config, *args, f"trainer.output_dir={stopped}", sig=sig,
                           ready=lambda: (stopped / "metrics.jsonl").exists() and len(curve(stopped)) >= 2)
    assert code == 128 + sig, out
    assert "the same command continues from there" in out
    step = json.loads(next((stopped / "checkpoints").glob("*/manifest.json")).read_text())["step"]
    assert 2 <= step < 8
    assert verl("train", config, *args, f"trainer.output_dir={stopped}").returncode == 0
    same(weights(whole), weights(stopped))


def test_a_finished_run_is_not_trained_again(config, tmp_path):
    out = f"trainer.output_dir={tmp_path / 'out'}"
    assert verl("train", config, "trainer.steps=2", out).returncode == 0
    before = weights(tmp_path / "out")
    assert verl("train", config, "trainer.steps=2", out).returncode == 0
    same(before, weights(tmp_path / "out"))
    assert [s for s, _ in curve(tmp_path / "out")] == [1, 2]


@pytest.mark.parametrize("algorithm", ["grpo", "dpo"])
def test_a_signal_during_the_update_loses_and_repeats_no_row(config, tmp_path, algorithm):
    """It arrives when the step is done but for its report: the next start must go on behind this step's prompts."""
    stop = tmp_path / "stop.py"
    stop.write_text("import os, signal\n\nclass Stop:\n    def on_step(self, step, metrics):\n"
                    "        step == 2 and os.kill(os.getpid(), signal.SIGTERM)\n")
    args = ["trainer.steps=4", f"trainer.algorithm={algorithm}"]
    whole, stopped = tmp_path / "whole", f"trainer.output_dir={tmp_path / 'stopped'}"
    assert verl("train", config, *args, f"trainer.output_dir={whole}").returncode == 0
    assert verl("train", config, *args, stopped, f"trainer.callbacks=['{stop}:Stop']").returncode == 128 + signal.SIGTERM
    assert verl("train", config, *args, stopped).returncode == 0
    assert curve(whole) == curve(tmp_path / "stopped")
    same(weights(whole), weights(tmp_path / "stopped"))


def test_adapters_resume_and_export_to_the_policy_that_was_trained(config, tmp_path):
    args = ["model.actor.lora.rank=4", "trainer.algo.kl_coef=0.1"]
    whole, short = tmp_path / "whole", tmp_path / "short"
    assert verl("train", config, *args, "trainer.steps=4", f"trainer.output_dir={whole}").returncode == 0
    assert verl("train", config, *args, "trainer.steps=2", f"trainer.output_dir={short}").returncode == 0
    half = weights(short)
    assert verl("train", config, *args, "trainer.steps=4", f"trainer.output_dir={short}").returncode == 0
    same(weights(whole), weights(short))
    assert curve(whole, "kl") == curve(short, "kl") and curve(whole, "kl")[-1][1] > 0
    assert any(not torch.equal(half[name], tensor) for name, tensor in weights(whole).items())
    (tmp_path / "exported").mkdir()
    assert verl("export", str(short), str(tmp_path / "exported" / "model")).returncode == 0
    same(weights(whole), weights(tmp_path / "exported"))
