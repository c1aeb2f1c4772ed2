"""Dynamic sampling (DAPO): further prompts replace groups without a signal, within bounds, and the log tells the whole truth."""

import json

from tiny_runs import verl, workspace

REWARD = '''
def alternating(prompts, completions, **_):
    """Groups of even prompts are all equal (no signal); of odd prompts they differ."""
    number = [int(p[-1]["content"].split("+")[0]) for p in prompts]
    return [1.0 if n % 2 == 0 else float(i % 2) for i, n in enumerate(number)]

def constant(completions, **_):
    return [1.0] * len(completions)
'''


def run(tmp_path, function: str, *more: str) -> list[dict]:
    config = workspace(tmp_path)
    (tmp_path / "dyn.py").write_text(REWARD)
    done = verl("train", str(config), "trainer.algorithm=dapo", f"trainer.rewards=[{{function: 'dyn.py:{function}'}}]",
                "trainer.steps=2", *more)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "step_time" in line]


def test_groups_without_a_signal_are_replaced_and_counted(tmp_path):
    """Field case D072: four usable groups a step, the reward logged over everything that was sampled."""
    first, second = run(tmp_path, "alternating")
    for line in (first, second):
        sampled, dropped = int(line["sampling/groups_sampled"]), int(line["sampling/groups_dropped"])
        assert sampled - dropped == 4 and sampled % 4 == 0 and sampled > 4
        assert 0.5 < line["reward"] < 1.0  # over all groups; over the trained ones alone it would be 0.5
    state = json.loads(next((tmp_path / "out" / "checkpoints").glob("*2/state.json")).read_text())
    consumed = int(first["sampling/groups_sampled"] + second["sampling/groups_sampled"])
    assert json.dumps(state).count(f'"position": {consumed}') == 1


def test_it_never_samples_for_ever(tmp_path):
    for line in run(tmp_path, "constant"):
        assert line["updates_skipped"] == 1.0 and line["reward"] == 1.0
        assert line["sampling/groups_sampled"] == 40  # ten rounds of four prompts
