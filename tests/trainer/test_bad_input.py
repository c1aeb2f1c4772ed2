"""What people get wrong: each has a clear message, an exit code, and nothing is lost."""

import json
import os
import resource
import signal
import subprocess
import sys
import time

import pytest
from tiny_runs import arithmetic, curve, tiny_model, verl, workspace, write_jsonl


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return str(workspace(tmp_path_factory.mktemp("bad")))


@pytest.fixture
def out(tmp_path):
    return f"trainer.output_dir={tmp_path / 'out'}"


def fails(*args: str, code: int | None = None) -> str:
    """The command fails without a traceback; returns its message."""
    done = verl(*args)
    assert done.returncode != 0, done.stdout
    assert code is None or done.returncode == code
    assert done.stderr.startswith("verl: "), done.stderr  # one readable message; a reward's own traceback may follow it
    return done.stderr


def test_wrong_paths(config, out):
    assert "nowhere.yaml" in fails("train", "nowhere.yaml")
    assert "not a model directory" in fails("train", config, out, "model.actor.model_name_or_path=/no/such/model")
    assert "missing.jsonl" in fails("train", config, out, "data.train=missing.jsonl")


def test_unknown_and_mistyped_settings_name_the_nearest(config, out):
    message = fails("train", config, out, "trainer.optm.lr=1e-3", "trainer.steps=many", code=2)
    assert "trainer.optim" in message and "trainer.steps" in message and "many" in message


def test_an_empty_file_and_a_file_without_prompts(config, out, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert "empty.jsonl" in fails("train", config, out, f"data.train={empty}")
    wrong = write_jsonl(tmp_path / "wrong.jsonl", [{"question": "1+1=", "answer": "2"}])
    message = fails("train", config, out, f"data.train={wrong}")
    assert "wrong.jsonl" in message and "prompt" in message


def test_a_prompt_longer_than_the_context_is_named_before_weights_load(config, out, tmp_path):
    rows = arithmetic(3) + [{"prompt": [{"role": "user", "content": "x" * 300}], "answer": "1"}]
    data = write_jsonl(tmp_path / "long.jsonl", rows)
    message = fails("train", config, out, f"data.train={data}")
    assert "318 > 248" in message and "long-3" in message  # the model has 256 tokens, max_tokens takes 8
    done = verl("train", config, out, f"data.train={data}", "data.overlong=drop", "trainer.steps=1")
    assert done.returncode == 0 and "1 dropped" in done.stdout


def test_a_tokenizer_without_chat_template(config, out, tmp_path):
    model = tiny_model(tmp_path / "plain", chat=False)
    assert "chat_template" in fails("train", config, out, f"model.actor.model_name_or_path={model}")


@pytest.mark.parametrize("function, words", [
    ("raises", ["raises", "ZeroDivisionError", "a bug in the reward"]),
    ("nan", ["nan", "finite"]),
    ("short", ["short", "1", "expected"]),
])
def test_a_broken_reward_stops_the_run_with_its_name(config, out, function, words):
    message = fails("train", config, out, f"trainer.rewards=[{{function: 'my.py:{function}'}}]")
    for word in words:
        assert word in message, message


def test_a_reward_that_abstains_on_everything_trains_nothing_and_says_so(config, tmp_path, out):
    done = verl("train", config, out, "trainer.rewards=[{function: 'my.py:nothing'}]", "trainer.steps=2")
    assert done.returncode == 0, done.stderr
    assert [v for _, v in curve(tmp_path / "out", "updates_skipped")] == [1.0, 1.0]
    assert curve(tmp_path / "out", "reward") == []


def test_no_reward_at_all(config, out):
    assert "trainer.rewards" in fails("train", config, out, "trainer.rewards=[]", code=2)


def test_a_second_run_in_the_same_directory_is_refused_while_the_first_lives(config, tmp_path):
    out = tmp_path / "out"
    args = ["train", config, f"trainer.output_dir={out}", "trainer.steps=500"]
    first = subprocess.Popen([sys.executable, "-m", "verl.cli.main", *args], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                             env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + 60
        while not (out / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        message = fails(*args)
        assert str(first.pid) in message
    finally:
        first.send_signal(signal.SIGTERM)
        first.wait(60)


def test_another_run_in_a_used_directory_is_refused(config, tmp_path, out):
    assert verl("train", config, out, "trainer.steps=1").returncode == 0
    message = fails("train", config, out, "trainer.steps=1", "trainer.seed=7")
    assert "trainer.seed" in message and "trainer.output_dir" in message
    assert "trainer.resume" in fails("train", config, out, "trainer.resume=false")
    assert json.loads((tmp_path / "out" / "identity.json").read_text())["trainer.seed"] == "0"


def test_a_full_disk_loses_nothing(config, tmp_path, out):
    assert verl("train", config, out, "trainer.steps=1").returncode == 0
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))  # a file of weights does not fit
    try:
        message = fails("train", config, out, "trainer.steps=2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "checkpoint" in message
    assert verl("train", config, out, "trainer.steps=2").returncode == 0
    assert [s for s, _ in curve(tmp_path / "out")] == [1, 2]
