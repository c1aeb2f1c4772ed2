"""The command line as a user meets it."""

import json

import pytest
from cli_runs import verl, workspace


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return workspace(tmp_path_factory.mktemp("cli"))


@pytest.fixture(scope="module")
def run(config):
    """A finished short run: (config, run directory, what it printed)."""
    done = verl("train", str(config))
    assert done.returncode == 0, done.stderr
    return config, config.parent / "out", done.stdout


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        verl("--help")
    for args in ([], ["train"], ["show"], ["show", "config"], ["generate"]):
        if args:
            with pytest.raises(SystemExit) as stop:
                verl(*args, "--help")
            assert stop.value.code == 0
    assert "verl doctor" in verl().stdout


def test_doctor_says_what_would_run():
    out = verl("doctor")
    assert out.returncode == 0 and "torch" in out.stdout and "CUDA graphs" in out.stdout and "would train in" in out.stdout


def test_a_run_shows_before_after_curves_and_what_to_do_next(run):
    _, out, printed = run
    assert "before" in printed and "after" in printed and "curves.png" in printed and "verl generate" in printed
    assert (out / "curves.png").stat().st_size > 5000
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["versions"]["torch"] and manifest["data"] and manifest["seed"] == 0
    assert "# default" in (out / "config.yaml").read_text() and "# run.yaml:" in (out / "config.yaml").read_text()


def test_show_config_says_where_each_value_comes_from(config):
    out = verl("show", "config", str(config), "trainer.optim.lr=1e-6").stdout
    assert "lr: 1.0e-06  # override" in out and "group_size: 4  # run.yaml:" in out and "seed: 0  # default" in out


def test_show_plan_data_graph_and_run(run):
    config, out, _ = run
    assert "4 prompts x 4 samples = 16 responses" in verl("show", "plan", str(config)).stdout
    rows = verl("show", "data", str(config)).stdout
    assert "prompt:" in rows and "'<|im_start|>'" in rows
    graph = verl("show", "graph", str(out)).stdout
    for verb in ("generate", "score", "credit", "update", "evaluate"):
        assert verb in graph
    shown = verl("show", "run", str(out)).stdout
    assert "reward" in shown and "curves.png" in shown


def test_generate_eval_and_export(run, tmp_path):
    config, out, _ = run
    once = verl("generate", str(out), "1+1=", "--max-tokens", "5", "--temperature", "1", "--samples", "2", "--seed", "3")
    again = verl("generate", str(out), "1+1=", "--max-tokens", "5", "--temperature", "1", "--samples", "2", "--seed", "3")
    assert once.returncode == 0 and once.stdout == again.stdout and once.stdout.startswith("> 1+1=")
    assert "reward" in verl("eval", str(config)).stdout
    assert verl("export", str(out), str(tmp_path / "m")).returncode == 0
    same = verl("generate", str(tmp_path / "m"), "1+1=", "--max-tokens", "5", "--temperature", "1", "--samples", "2", "--seed", "3")
    assert same.stdout == once.stdout


def test_stray_words_and_missing_runs_are_one_line(config, tmp_path):
    for args in (["train", str(config), "lr"], ["show", "graph", str(tmp_path)], ["show", "run", str(tmp_path)],
                 ["export", str(tmp_path), str(tmp_path / "x")], ["doctor", "a.b=1"], ["generate", str(tmp_path), "x"]):
        done = verl(*args)
        assert done.returncode != 0 and done.stderr.startswith("verl: ") and "Traceback" not in done.stderr, args
