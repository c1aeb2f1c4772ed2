"""RewardModel on real tiny BERT-, GPT-2- and Llama-like directories."""

import json
import warnings

import pytest
import torch
from tiny_models import TEXTS, build
from transformers import AutoModelForSequenceClassification, GraniteConfig, GraniteModel

from verl.core.errors import ModelError
from verl.models.reward_model import RewardModel


@pytest.fixture(scope="module", params=["bert", "llama", "gpt2"])
def model(request, tmp_path_factory):
    return RewardModel(build(request.param, tmp_path_factory.mktemp(request.param)))


def test_scores_do_not_depend_on_batch_order_or_company(model):
    together = model.score(TEXTS)
    alone = [model.score([text])[0] for text in TEXTS]
    model.batch_size = 3
    assert model.score(TEXTS[::-1]) == pytest.approx(together[::-1], abs=1e-5)
    assert alone == pytest.approx(together, abs=1e-5) and len(set(together)) == len(TEXTS)


def test_scores_equal_the_classifier_itself_on_unpadded_rows(model):
    stock = AutoModelForSequenceClassification.from_pretrained(model.name).eval()
    for text, score in zip(TEXTS, model.score(TEXTS)):
        ids = torch.tensor(model.encode([text]))
        assert stock(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.item() == pytest.approx(score, abs=1e-5)


@pytest.mark.parametrize("rows", [1, 8])
def test_the_last_real_token_is_pooled_when_pad_is_eos(tmp_path, rows):
    """Field case D044 (ids 9, 2, 8, 2 with pad = eos = 2), right-padded, left-padded and unpadded; gpt2: absolute positions."""
    for kind in ("llama", "gpt2"):
        model = RewardModel(build(kind, tmp_path / kind))
        model.tokenizer.pad_token_id = 2
        layouts = {"right": ([9, 2, 8, 2, 2, 2], [1, 1, 1, 1, 0, 0]), "left": ([2, 2, 9, 2, 8, 2], [0, 0, 1, 1, 1, 1]),
                   "none": ([9, 2, 8, 2], [1, 1, 1, 1])}
        scores = {name: model(torch.tensor([ids] * rows), torch.tensor([mask] * rows)) for name, (ids, mask) in layouts.items()}
        assert torch.allclose(scores["right"], scores["none"], atol=1e-5), kind
        assert torch.allclose(scores["left"], scores["none"], atol=1e-5), kind
        prefix = model(torch.tensor([[9, 2, 8]]), torch.ones(1, 3, dtype=torch.long))
        assert not torch.allclose(prefix, scores["none"][:1], atol=1e-3), kind  # the last token does matter


@pytest.mark.parametrize("kind", ["bert-base", "llama-base"])
def test_a_plain_base_model_starts_a_seeded_head_and_says_so(tmp_path, kind):
    path = build(kind, tmp_path)
    with pytest.warns(UserWarning, match="no reward head; a fresh one was started from seed 0"):
        first = RewardModel(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again, other = RewardModel(path), RewardModel(path, seed=1)
    assert first.fresh_head and first.score(TEXTS) == again.score(TEXTS) != other.score(TEXTS)
    first.save_pretrained(tmp_path / "saved")
    loaded = RewardModel.from_pretrained(str(tmp_path / "saved"))
    assert not loaded.fresh_head and loaded.score(TEXTS) == pytest.approx(first.score(TEXTS), abs=1e-6)


def test_an_architecture_without_a_classifier_in_transformers_gets_a_head_of_ours(tmp_path):
    from tiny_models import SIZE, tokenizer
    tokenizer("llama", tmp_path)
    GraniteModel(GraniteConfig(**SIZE, num_key_value_heads=2)).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="fresh one"):
        model = RewardModel(str(tmp_path), num_labels=2)
    model.save_pretrained(tmp_path / "saved")
    loaded = RewardModel.from_pretrained(str(tmp_path / "saved"))
    assert loaded.num_labels == 2 and not loaded.fresh_head
    assert loaded.score(TEXTS) == pytest.approx(model.score(TEXTS), abs=1e-6)


def test_a_step_of_training_moves_backbone_and_head(tmp_path):
    model = RewardModel(build("llama", tmp_path), dropout=0.0)
    ids = torch.tensor(model.encode(["good"]))
    model.train()
    model(ids, torch.ones_like(ids)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in (model.model.score.weight, model.model.model.norm.weight))


def test_dropout_acts_in_training_only(tmp_path):
    model = RewardModel(build("llama", tmp_path), dropout=0.5)
    ids = torch.tensor(model.encode(["good"]))
    model.train()
    noisy = {model(ids, torch.ones_like(ids)).item() for _ in range(5)}
    assert len(noisy) > 1 and model.score(["good"]) == model.score(["good"]) and model.training


def test_two_labels_are_log_odds_and_more_are_refused(tmp_path):
    model = RewardModel(build("bert", tmp_path / "two", labels=2), num_labels=2)
    ids = torch.tensor(model.encode(["good"]))
    logits = model(ids, torch.ones_like(ids))[0]
    assert model.score(["good"])[0] == pytest.approx((logits[1] - logits[0]).item(), abs=1e-6)
    with pytest.raises(ModelError, match="has a head with 2 labels, num_labels is 1; pass num_labels=2"):
        RewardModel(str(tmp_path / "two"))
    with pytest.raises(ModelError, match="3 labels"):
        RewardModel(build("bert", tmp_path / "three", labels=3), num_labels=3).score(["x"])


def test_too_long_texts_keep_their_end_and_are_counted(tmp_path):
    model = RewardModel(build("bert", tmp_path))
    assert model.max_length == 64
    long = "good " * 200
    ids = model.encode([long + "bad answers", "good"])
    assert len(ids[0]) == 64 and ids[0][0] == model.tokenizer.cls_token_id and model.truncated == 1
    assert model.tokenizer.decode(ids[0], skip_special_tokens=True).endswith("bad answers")
    assert model.score([long + "bad answers"]) != model.score([long + "good"])


def test_odd_texts_are_scored(model):
    """Field case D036: nothing a decoder may produce raises."""
    assert len(model.score(["", "ok \ufffd", "\x00", "\U0001f642", "\u4f60\u597d"])) == 5


def test_code_in_the_directory_is_refused_and_never_runs(tmp_path):
    """Field case D067, second part: the reward model has a switch of its own."""
    path = build("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModelForSequenceClassification": "modeling_x.X"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "modeling_x.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w').write('ran')\nclass X: pass\n")
    with pytest.raises(ModelError, match="trust_remote_code"):
        RewardModel(path)
    assert not (tmp_path / "marker").exists()


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    path = build("bert", tmp_path)
    model = RewardModel(path)
    model.tokenizer.add_tokens([f"new{i}" for i in range(200)])
    model.tokenizer.save_pretrained(path)
    with pytest.raises(ModelError, match="the model only 400 embedding rows"):
        RewardModel(path)
