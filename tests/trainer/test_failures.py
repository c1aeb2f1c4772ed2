"""What goes wrong late or beside the training costs no finished step, and nothing of another run is taken over."""

import json
import os
from pathlib import Path

import pytest
import torch
from tiny_runs import arithmetic, curve, verl, weights, workspace, write_jsonl

from verl.trainer import run as run_file

USER = '''
import json, os

def once(completions, trainer_state, **_):
    """Fails in the fourth step of a directory where `fixed` does not stand."""
    if trainer_state.global_step == 3 and not os.path.exists(__file__ + ".fixed"):
        raise ConnectionError("the judge is down")
    return [sum(ch.isdigit() for ch in (c if isinstance(c, str) else c[-1]["content"])) / 8 for c in completions]

class Bug:
    def on_step(self, step, metrics):
        if step == 2:
            raise ValueError("a bug in a callback")
'''


@pytest.fixture
def config(tmp_path):
    path = workspace(tmp_path)
    (tmp_path / "user.py").write_text(USER)
    return str(path)


def steps_saved(out: Path) -> list[int]:
    return sorted(json.loads(m.read_text())["step"] for m in (out / "checkpoints").glob("step_*/manifest.json"))


def test_a_reward_that_breaks_late_costs_no_finished_step(config, tmp_path):
    args = ["trainer.rewards=[{function: 'user.py:once'}]", "trainer.eval.every=1", "trainer.steps=5"]
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    failed = verl("train", config, *args, f"trainer.output_dir={broken}")
    assert failed.returncode == 1 and "the judge is down" in failed.stderr
    assert steps_saved(broken) == [3]
    (tmp_path / "user.py.fixed").touch()
    resumed = verl("train", config, *args, f"trainer.output_dir={broken}")
    assert resumed.returncode == 0 and "resuming after step 3" in resumed.stdout
    assert verl("train", config, *args, f"trainer.output_dir={whole}").returncode == 0
    assert curve(broken) == curve(whole)
    a, b = weights(broken), weights(whole)
    assert all(torch.equal(a[name], b[name]) for name in b)


def test_a_callback_that_raises_costs_no_finished_step(config, tmp_path):
    with pytest.raises(ValueError, match="a bug in a callback"):
        verl("train", config, "trainer.callbacks=['user.py:Bug']")
    assert steps_saved(tmp_path / "out") == [2]
    assert verl("train", config).returncode == 0
    assert [step for step, _ in curve(tmp_path / "out")] == [1, 2, 3, 4]


def test_a_picture_that_cannot_be_drawn_costs_no_model(config, tmp_path):
    (tmp_path / "out" / "curves.png").mkdir(parents=True)
    done = verl("train", config, "trainer.steps=1")
    assert done.returncode == 0 and "verl show run" in done.stdout
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()


def test_a_full_disk_leaves_the_identity_of_a_run_whole(config, tmp_path, monkeypatch):
    assert verl("train", config, "trainer.steps=1").returncode == 0
    before = {name: (tmp_path / "out" / name).read_text() for name in ("identity.json", "config.yaml", "manifest.json")}

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space"):
            verl("train", config, "trainer.steps=2")
    assert {name: (tmp_path / "out" / name).read_text() for name in before} == before


@pytest.mark.parametrize("change", ["trainer.sampling.temperature=0.5", "trainer.optim.lr=1e-5", "data.train={other}"])
def test_finished_samples_of_other_settings_or_data_are_not_taken_over(config, tmp_path, change):
    other = write_jsonl(tmp_path / "other.jsonl", arithmetic(60)[20:])
    change = change.format(other=other)
    (tmp_path / "user.py").write_text(USER.replace("== 3", ">= 0"))  # nothing but the journal is left behind
    args = ["trainer.rewards=[{function: 'user.py:once'}]", "data.eval=null", "trainer.steps=1"]
    assert verl("train", config, *args).returncode == 1
    assert (tmp_path / "out" / "progress.journal").stat().st_size > 3000 and not (tmp_path / "out" / "checkpoints").exists()
    (tmp_path / "user.py.fixed").touch()
    kept = "finished samples of the interrupted step are kept"
    assert kept not in verl("train", config, *args, change).stdout


def test_the_journal_is_bounded_without_checkpoints(config, tmp_path, monkeypatch):
    monkeypatch.setattr(run_file, "JOURNAL_BYTES", 5000)  # less than two steps
    sizes = []
    (tmp_path / "size.py").write_text("import os\n\nclass Size:\n    def on_step(self, step, metrics):\n"
                                      f"        metrics['size'] = os.path.getsize({str(tmp_path / 'out/progress.journal')!r})\n"
                                      f"        open({str(tmp_path / 'sizes')!r}, 'a').write(str(metrics['size']) + '\\n')\n")
    assert verl("train", config, "trainer.steps=5", "trainer.callbacks=['size.py:Size']").returncode == 0
    sizes = [int(line) for line in (tmp_path / "sizes").read_text().split()]
    assert len(sizes) == 5 and max(sizes) <= 2.1 * sizes[0]


def test_the_config_of_a_run_directory_loads_back_to_the_same_run(config, tmp_path):
    assert verl("train", config, "trainer.steps=1").returncode == 0
    again = verl("train", str(tmp_path / "out" / "config.yaml"), "trainer.steps=2")
    assert again.returncode == 0 and "resuming after step 1" in again.stdout, again.stderr
    assert "reward" in verl("eval", str(tmp_path / "out" / "config.yaml")).stdout


def test_reward_functions_have_the_trainer_state_in_every_evaluation(config, tmp_path):
    (tmp_path / "user.py.fixed").touch()
    rewards = "trainer.rewards=[{function: 'user.py:once'}]"
    assert verl("train", config, "trainer.steps=1", rewards).returncode == 0
    assert verl("eval", config, rewards).returncode == 0
