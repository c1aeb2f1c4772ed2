"""Documents say what is true: every command parses, every setting exists, every link leads somewhere, every setting is read."""

import ast
import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from verl.cli.main import parser
from verl.core.config import settings
from verl.data.config import DataConfig
from verl.rewards.config import RewardSource
from verl.trainer.config import ALIASES, RoleConfig, RunConfig

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_commands_in_the_docs_parse(path):
    command = r"^\s*(?:\$ )?verl ((?:train|plan|doctor|show|eval|generate|export) .*|doctor)$"
    for line in re.findall(command, path.read_text(), re.M):
        words = shlex.split(line.split("  #")[0].split("   ")[0])
        args, rest = parser().parse_known_args(words)
        assert hasattr(args, "run"), line
        assert hasattr(args, "config") or not rest, line


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_settings_in_the_docs_exist(path):
    from verl.algorithms import ALGORITHMS
    known = {s.key for s in settings(RunConfig)} | set(ALIASES)
    known |= {f"trainer.algo.{f.name}" for name in ALGORITHMS for f in dataclasses.fields(ALGORITHMS[name])}
    sections = {key.rsplit(".", i)[0] for key in known for i in range(1, key.count(".") + 1)}
    sections |= {"trainer.rewards"} | {f"trainer.rewards.{f.name}" for f in dataclasses.fields(RewardSource)}
    for key in set(re.findall(r"\b((?:trainer|model|data)\.[a-z_]+(?:\.[a-z_]+)*)", path.read_text())):
        if not re.search(r"\.(py|md|json|jsonl|yaml)$", key):
            assert key in known | sections, f"{path.name} speaks of {key}, which is no setting"


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"


def _fields(schema) -> list[str]:
    return [f.name for f in dataclasses.fields(schema) if f.init]


def test_every_setting_is_read_somewhere():
    """A field that no code reads as an attribute would be a setting without effect."""
    from verl.trainer import config as c
    read = set()
    for file in (ROOT / "verl").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
    schemas = [c.TrainerConfig, c.SamplingConfig, c.EvalConfig, c.SaveConfig, c.RolloutConfig, c.RoleConfig, c.TrainedRoleConfig,
               c.FsdpConfig, c.OptimConfig, c.LoraConfig, DataConfig, RewardSource]
    for schema in schemas:
        for name in _fields(schema):
            assert name in read, f"{schema.__name__}.{name} is never read"


def test_a_full_run_has_fewer_than_80_settings():
    """Distinct settings: the fields that all roles share count once; a reward source's are described beside it."""
    roles = len(_fields(RoleConfig))
    rows = [s for s in settings(RunConfig) if not s.key.startswith("trainer.rewards[]")]
    assert len(rows) - 3 * roles < 80
    assert all(s.help for s in rows if not s.key.startswith("trainer.algo.")), [s.key for s in rows if not s.help]


def test_the_readme_config_and_reward_are_real(tmp_path):
    """The five-minute recipe as printed: its settings load, its reward scores."""
    from verl.rewards.build import build_rewards
    from verl.trainer.config import load_run
    text = (ROOT / "README.md").read_text()
    config = re.search(r"```yaml\n# my.yaml\n(.*?)```", text, re.S).group(1)
    reward = re.search(r"```python\n# my_reward.py(.*?)```", text, re.S).group(1)
    (tmp_path / "my.yaml").write_text(config)
    (tmp_path / "my_reward.py").write_text("#" + reward)
    run = load_run(tmp_path / "my.yaml").config
    assert run.trainer.samples_per_prompt == 8 and run.data.train == str(tmp_path / "prompts.jsonl")
    assert build_rewards(run.trainer.rewards, base_dir=tmp_path).describe()
