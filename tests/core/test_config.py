"""Loading a config: types, origins, aliases, errors (field cases D029, D039, D024)."""

import dataclasses
import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from verl.core.config import dump, load, option, settings
from verl.core.errors import ConfigError


class Kind(enum.StrEnum):
    A = "a"
    B = "b"


@dataclass(frozen=True)
class PPO:
    clip: float = option(0.2, "Half width of the ratio clip.")
    dual_clip: float = 3.0

    def __post_init__(self):
        if self.dual_clip <= 1:
            raise ConfigError(f"dual_clip: must be above 1, got {self.dual_clip}")


@dataclass(frozen=True)
class DPO:
    beta: float = 0.1


ALGORITHMS = {"ppo": PPO, "dpo": DPO}


def algorithm_schema(section: dict) -> type:
    if section["algorithm"] not in ALGORITHMS:
        raise ConfigError(f"algorithm: {section['algorithm']!r} is not known; allowed: dpo, ppo")
    return ALGORITHMS[section["algorithm"]]


@dataclass
class Source:
    name: str
    weight: float = 1.0


@dataclass
class Role:
    model_name_or_path: str | None = option(None, "Model directory or hub name.", path=True)
    lr: float = 1e-6
    dtype: Literal["auto", "bf16"] = "auto"


@dataclass
class Trainer:
    algorithm: str = "ppo"
    algo: Any = option(None, schema_from=algorithm_schema)
    steps: int = option(10, "Optimizer steps.")
    task_weights: dict[str, float] | list[float] = field(default_factory=dict)
    rewards: list[str | Source] = field(default_factory=list)
    output_dir: Path = Path("runs")
    kl: float | Literal["auto"] = "auto"
    betas: tuple[float, float] = (0.9, 0.999)
    strict: bool = False
    kind: Kind = Kind.A
    run_name: str | None = None


@dataclass
class Model:
    actor: Role = field(default_factory=Role)
    critic: Role | None = None
    reference: Role = field(default_factory=lambda: Role(lr=0.5))


@dataclass
class Run:
    trainer: Trainer = field(default_factory=Trainer)
    model: Model = field(default_factory=Model)


def written(tmp_path, text, name="run.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


# ----------------------------------------------------------------------------------------------------- D039: numbers
@dataclass
class Numbers:
    learning_rate: float = 0.0
    beta: float = 0.0
    max_steps: int = 0
    weight_decay: float = 0.0
    seed: int = 0
    warmup_steps: int = 0
    run_name: str = ""


def test_d039_yaml_numbers_follow_the_schema(tmp_path):
    path = written(tmp_path, "learning_rate: 1e-6\nbeta: 1E-2\nmax_steps: 1e3\nweight_decay: '0.1'\n"
                             "warmup_steps: 1_000\nrun_name: no\n")
    config = load(Numbers, path).config
    assert config == Numbers(1e-6, 0.01, 1000, 0.1, 0, 1000, "no")
    assert type(config.max_steps) is int and type(config.beta) is float


def test_d039_leading_zero_is_explained(tmp_path):
    with pytest.raises(ConfigError, match=r"seed \(run.yaml:1\): 010 has a leading zero.*write 10 \(or 0o10"):
        load(Numbers, written(tmp_path, "seed: 010\n"))


@pytest.mark.parametrize("words", [["--learning_rate", "1e-6"], ["--learning_rate=1e-6"], ["learning_rate=1e-6"]])
def test_d039_overrides_read_like_the_file(words):
    loaded = load(Numbers, overrides=words)
    assert loaded.config.learning_rate == 1e-6
    assert loaded.origins["learning_rate"] == "override" and loaded.origins["beta"] == "default"


def test_d039_bad_number_names_key_and_value(tmp_path):
    with pytest.raises(ConfigError) as error:
        load(Numbers, written(tmp_path, "learning_rate: 1e-6x\n"))
    assert str(error.value) == "learning_rate (run.yaml:1): '1e-6x' is not a number"


@pytest.mark.parametrize("text, value", [("12", 12), ("0x1f", 31), ("0o17", 15), ("-3", -3), ("12.0", 12), ("1_0", 10)])
def test_integers(text, value):
    assert load(Numbers, overrides=[f"seed={text}"]).config.seed == value


@pytest.mark.parametrize("text", ["1.5", "true", "abc", "[1]", "1e-3", "", "12 apples", "１２", "1e999999999"])
def test_not_integers(text):
    with pytest.raises(ConfigError, match=r"^seed \(override\)"):
        load(Numbers, overrides=[f"seed={text}"])


def test_float_accepts_infinity_but_not_nan():
    assert load(Numbers, overrides=["beta=.inf"]).config.beta == float("inf")
    with pytest.raises(ConfigError, match="'nan' is not a number"):
        load(Numbers, overrides=["beta=nan"])
    with pytest.raises(ConfigError, match="'nan' is not a number"):
        load(Numbers, data={"beta": float("nan")})


def test_python_values_keep_their_types():
    assert load(Numbers, data={"seed": 3, "beta": 2, "run_name": "5"}).config == Numbers(seed=3, beta=2.0, run_name="5")
    with pytest.raises(ConfigError, match=r"seed \(argument\): expected int, got True"):
        load(Numbers, data={"seed": True})
    with pytest.raises(ConfigError, match="expected str, got 5"):
        load(Numbers, data={"run_name": 5})


# ------------------------------------------------------------------------------------------------- D029: unknown keys
@dataclass
class Training:
    num_generations: int = 8
    learning_rate: float = 1e-6


@dataclass
class Algo:
    kl_coef: float = 0.0


@dataclass
class Logging:
    enabled: bool = True


@dataclass
class D029:
    training: Training = field(default_factory=Training)
    algorithm: Algo = field(default_factory=Algo)
    logging: Logging = field(default_factory=Logging)


def test_d029_all_unknown_keys_at_once_with_suggestions(tmp_path):
    path = written(tmp_path, "training:\n  num_genrations: 16\n  lr: 1.0e-6\nkl_coef: 0.1\nlogging:\n  enable: false\n")
    with pytest.raises(ConfigError) as error:
        load(D029, path)
    lines = str(error.value).splitlines()
    assert lines[0] == "4 problems in the settings:" and len(lines) == 5
    for line, key, guess in zip(
            sorted(lines[1:]),
            ["kl_coef (run.yaml:4)", "logging.enable (run.yaml:6)", "training.lr (run.yaml:3)",
             "training.num_genrations (run.yaml:2)"],
            ["algorithm.kl_coef", "logging.enabled", "training.learning_rate", "training.num_generations"]):
        assert line.strip() == f"{key}: is not a setting; did you mean {guess!r}?"


def test_d029_same_key_on_the_command_line():
    with pytest.raises(ConfigError, match="training.lr .override.: is not a setting; did you mean 'training.learning_"):
        load(D029, overrides=["--training.lr=1e-6"])


def test_d029_duplicated_key(tmp_path):
    with pytest.raises(ConfigError, match=r"kl_coef \(run.yaml:3\): this key is written twice, first at run.yaml:2"):
        load(D029, written(tmp_path, "algorithm:\n  kl_coef: 0.1\n  kl_coef: 0.2\n"))


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "training:\n", "\ufeff"])
def test_d029_empty_file(tmp_path, text):
    assert load(D029, written(tmp_path, text)).config == D029()


def test_unknown_key_without_a_near_one_lists_what_is_allowed():
    with pytest.raises(ConfigError, match="allowed here: num_generations, learning_rate"):
        load(D029, overrides=["training.zzz=1"])


def test_unknown_section_names_the_nearest():
    with pytest.raises(ConfigError, match="traning .argument.: is not a setting; did you mean 'training'"):
        load(D029, data={"traning": {"learning_rate": 1}})


# ---------------------------------------------------------------------------------------------------- sections, types
def test_every_type_and_its_origin(tmp_path):
    path = written(tmp_path, """\
trainer:
  algo: {clip: 1e-1}
  steps: 5
  task_weights:
    sft: 1
  rewards: [gsm8k, {name: mine, weight: 2}]
  output_dir: out
  betas: [0.8, 0.9]
  kind: b
  strict: yes
model:
  critic: {lr: 1e-5}
  reference: {dtype: bf16}
""")
    config, origins, text = (lambda r: (r.config, r.origins, r.text))(load(
        Run, path, ["trainer.steps=7", "trainer.kl=0.5", "trainer.rewards.1.weight=3", "trainer.task_weights.ppo=2"]))
    assert text == path.read_text()
    t = config.trainer
    assert t.algo == PPO(clip=0.1) and t.steps == 7 and t.kl == 0.5 and t.betas == (0.8, 0.9) and t.kind is Kind.B
    assert t.task_weights == {"sft": 1.0, "ppo": 2.0} and t.rewards == ["gsm8k", Source("mine", 3.0)]
    assert t.strict is True and t.output_dir == tmp_path / "out"
    assert config.model.critic == Role(lr=1e-5)
    assert config.model.reference == Role(lr=0.5, dtype="bf16"), "the section's own default survives beside a set key"
    assert origins["trainer.steps"] == "override" and origins["trainer.algo.clip"] == "run.yaml:2"
    assert origins["trainer.betas"] == "run.yaml:8" and origins["trainer.algo.dual_clip"] == "default"


def test_all_kinds_of_bad_values_are_reported_together():
    with pytest.raises(ConfigError) as error:
        load(Run, overrides=["trainer.kl=often", "trainer.betas=[1]", "trainer.strict=maybe", "trainer.kind=c",
                             "model.actor.dtype=bf61", "trainer.rewards=[{weight: 1}]", "trainer.steps=null",
                             "trainer.task_weights=3", "model.actor=5"])
    lines = [line.strip() for line in str(error.value).splitlines()[1:]]
    assert lines == [
        "trainer.steps (override): expected int, got nothing (null)",
        "trainer.task_weights (override): expected dict[str, float] | list[float], got '3'",
        "trainer.rewards.0.name (override): is required and has no default; set trainer.rewards.0.name=...",
        "trainer.kl (override): expected float | auto, got 'often'",
        "trainer.betas (override): expected 2 values (tuple[float, float]), got 1",
        "trainer.strict (override): expected true or false, got 'maybe'",
        "trainer.kind (override): 'c' is not allowed; use one of a, b",
        "model.actor (override): is a section with the keys model_name_or_path, lr, dtype; got '5'",
    ]


def test_a_near_miss_of_an_option_is_suggested():
    with pytest.raises(ConfigError, match=r"'bf61' is not allowed; use one of auto, bf16 \(did you mean 'bf16'\?\)"):
        load(Run, overrides=["model.actor.dtype=bf61"])


def test_null_switches_an_optional_section_off_and_an_empty_one_keeps_defaults(tmp_path):
    path = written(tmp_path, "model:\n  critic: {lr: 1}\n  actor:\n")
    config = load(Run, path, ["model.critic=null"]).config
    assert config.model.critic is None and config.model.actor == Role()


def test_an_override_with_a_mapping_replaces_where_a_dotted_one_merges():
    data = {"trainer": {"task_weights": {"a": 1}}}
    assert load(Run, data=data, overrides=["trainer.task_weights={b: 2}"]).config.trainer.task_weights == {"b": 2.0}
    assert load(Run, data=data, overrides=["trainer.task_weights.b=2"]).config.trainer.task_weights == {"a": 1, "b": 2}


def test_an_override_text_with_colons_is_a_string():
    assert load(Run, overrides=["trainer.run_name=a: b # c"]).config.trainer.run_name == "a: b # c"


def test_flags_and_bad_words():
    assert load(Run, overrides=["--trainer.strict", "--trainer.steps", "3"]).config.trainer.steps == 3
    for word in ("trainer.steps", "trainer..steps=1", "=1"):
        with pytest.raises(ConfigError, match="override"):
            load(Run, overrides=[word])


# ------------------------------------------------------------------------------------------------- dependent sections
def test_d024_a_check_of_the_algorithm_names_the_full_key(tmp_path):
    path = written(tmp_path, "trainer:\n  algo:\n    dual_clip: 1.0\n")
    with pytest.raises(ConfigError) as error:
        load(Run, path)
    assert str(error.value) == "trainer.algo.dual_clip (run.yaml:3): must be above 1, got 1.0"


def test_the_algorithm_chooses_its_own_settings():
    assert load(Run).config.trainer.algo == PPO()
    assert load(Run, overrides=["trainer.algorithm=dpo", "trainer.algo.beta=1"]).config.trainer.algo == DPO(1.0)
    with pytest.raises(ConfigError, match="trainer.algo.clip .override.: is not a setting; allowed here: beta"):
        load(Run, overrides=["trainer.algorithm=dpo", "trainer.algo.clip=1"])
    with pytest.raises(ConfigError, match="^trainer.algorithm .override.: 'pop' is not known"):
        load(Run, overrides=["trainer.algorithm=pop"])


# ------------------------------------------------------------------------------------------------------------ aliases
ALIASES = {"clip_coef": "trainer.algo.clip", "trainer.max_steps": "trainer.steps", "model.policy": "model.actor"}


def test_an_alias_is_another_spelling(tmp_path):
    path = written(tmp_path, "clip_coef: 0.3\nmodel:\n  policy:\n    lr: 1e-3\n")
    loaded = load(Run, path, ["trainer.max_steps=4"], aliases=ALIASES)
    assert loaded.config.trainer.algo.clip == 0.3 and loaded.config.trainer.steps == 4
    assert loaded.config.model.actor.lr == 1e-3
    assert loaded.origins["trainer.algo.clip"] == "alias clip_coef in run.yaml:1"
    assert loaded.origins["trainer.steps"] == "alias trainer.max_steps in override"


def test_alias_and_canonical_key_must_agree(tmp_path):
    same = written(tmp_path, "clip_coef: 2e-1\ntrainer: {algo: {clip: 0.2}}\n")
    assert load(Run, same, aliases=ALIASES).config.trainer.algo.clip == 0.2
    other = written(tmp_path, "clip_coef: 0.3\ntrainer:\n  algo: {clip: 0.2}\n")
    with pytest.raises(ConfigError) as error:
        load(Run, other, aliases=ALIASES)
    assert str(error.value) == ("trainer.algo.clip = 0.2 (run.yaml:3) and clip_coef = 0.3 (run.yaml:1) are one "
                                "setting; keep one")
    with pytest.raises(ConfigError, match=r"model.actor.lr = 1 \(override\) and model.policy.lr = 2 \(override\)"):
        load(Run, overrides=["model.actor.lr=1", "model.policy.lr=2"], aliases=ALIASES)


def test_an_override_by_alias_beats_the_file(tmp_path):
    path = written(tmp_path, "trainer: {algo: {clip: 0.2}}\n")
    assert load(Run, path, ["clip_coef=0.5"], aliases=ALIASES).config.trainer.algo.clip == 0.5


# -------------------------------------------------------------------------------------------------------------- paths
def test_paths_belong_to_the_file_they_stand_in(tmp_path, monkeypatch):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path / "conf", "trainer: {output_dir: ../out}\nmodel:\n  actor: {model_name_or_path: tiny}\n"
                                      "  critic: {model_name_or_path: org/name}\n")
    config = load(Run, path).config
    assert config.trainer.output_dir == tmp_path / "out"
    assert config.model.actor.model_name_or_path == str(tmp_path / "conf" / "tiny")
    assert config.model.critic.model_name_or_path == "org/name", "a hub name is left alone"
    assert load(Run, path, ["trainer.output_dir=o2"]).config.trainer.output_dir == tmp_path / "o2"
    assert load(Run).config.trainer.output_dir == tmp_path / "runs"


def test_a_missing_config_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="config file '.*none.yaml' cannot be read: No such file"):
        load(Run, tmp_path / "none.yaml")


@pytest.mark.parametrize("text, expected", [
    ("a: [1", "run.yaml:1: this is not YAML"), ("- 1\n", "a config is a mapping"), ("just words\n", "is a mapping"),
    ("a: !!python/object:os.system x\n", "tag .* is not allowed"), ("a: &x [*x]\n", "contains itself"),
    ("? [1]\n: 2\n", "a key must be a plain word"), ("a: 1\n---\nb: 2\n", "this is not YAML")])
def test_files_that_are_not_a_config(tmp_path, text, expected):
    with pytest.raises(ConfigError, match=expected):
        load(Run, written(tmp_path, text))


def test_anchors_and_merge_keys(tmp_path):
    path = written(tmp_path, "model:\n  actor: &a {lr: 1, dtype: bf16}\n  critic:\n    <<: *a\n    lr: 2\n")
    assert load(Run, path).config.model.critic == Role(lr=2.0, dtype="bf16")


# ---------------------------------------------------------------------------------------------------- dump, settings
def test_dump_loads_back_and_carries_origins(tmp_path):
    loaded = load(Run, data={
        "trainer": {"algorithm": "dpo", "algo": {"beta": 1e-7}, "run_name": "no", "rewards": ["a: b", {"name": "1e3"}],
                    "task_weights": {"a b": float("inf")}, "kl": 2}, "model": {"critic": {"lr": 1e-5}}})
    text = dump(loaded.config, loaded.origins)
    assert "    beta: 1.0e-07  # argument\n" in text and "  steps: 10  # default\n" in text
    assert load(Run, written(tmp_path, text, "back.yaml")).config == loaded.config
    assert yaml.safe_load(text)["trainer"]["algo"]["beta"] == 1e-7, "other YAML readers agree"
    assert yaml.safe_load(text)["trainer"]["run_name"] == "no"


def test_dump_refuses_what_yaml_cannot_hold():
    with pytest.raises(ConfigError, match="trainer.algo: a function cannot be written"):
        dump(dataclasses.replace(Run(), trainer=Trainer(algo=lambda: 0)))


def test_settings_lists_every_leaf():
    rows = {row.key: row for row in settings(Run)}
    assert rows["trainer.steps"] == ("trainer.steps", "int", 10, "Optimizer steps.")
    assert rows["trainer.algo.clip"].help == "Half width of the ratio clip."
    assert rows["trainer.rewards[].name"].default is dataclasses.MISSING
    assert rows["trainer.kl"].type == "float | auto" and rows["model.critic.dtype"].type == "auto | bf16"
    assert len(rows) == len(settings(Run)) == 11 + 2 + 1 + 9 - 1


def test_string_values_survive_any_text(tmp_path):
    for text in ["", " a", "a #b", "[x", "é\u2028x", "1_0", "~", "null", "- a", "a:", "'q'", '"', "\t", "=", "0x1", "*a"]:
        loaded = load(Run, data={"trainer": {"run_name": text}})
        assert load(Run, written(tmp_path, dump(loaded.config))).config.trainer.run_name == text


@dataclass
class Outer:
    trainer: Numbers = field(default_factory=Numbers)

    def __post_init__(self):
        if self.trainer.seed == 13:
            raise ConfigError("trainer.seed: 13 leaves no luck")


def test_a_check_across_sections_points_at_the_line_of_its_key(tmp_path):
    with pytest.raises(ConfigError, match=r"^trainer.seed \(run.yaml:3\): 13 leaves no luck$"):
        load(Outer, written(tmp_path, "trainer:\n  beta: 1\n  seed: 13\n"))
