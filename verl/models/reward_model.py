"""RewardModel: a directory with its own tokenizer that turns text into one number; encoder or decoder."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from verl.core.errors import ModelError
from verl.models.load import _check_directory, load_tokenizer, resolve_dtype

_HEAD_FILE = "reward_head.safetensors"  # only for architectures that transformers has no sequence classifier for


class _Headed(nn.Module):
    """A backbone without a sequence classifier in transformers, and a linear head in the classifiers' shape."""

    def __init__(self, base_model: nn.Module, hidden: int, num_labels: int):
        super().__init__()
        self.base_model, self.config = base_model, base_model.config
        self.score = nn.Linear(hidden, num_labels, bias=False)


class RewardModel(nn.Module):
    """Scores decoded text with a model of its own kind: a Chinese BERT can judge a Qwen policy.

    `base_model_name` is a sequence classifier's directory (or hub name when online), or a plain base model, which then
    starts a fresh head from `seed` and says so in a warning. `dropout` acts before the head in training mode only.
    Decoders are pooled at the last real token, found by the attention mask and never by token ids.

    `truncated` counts the texts that lost their beginning to `max_length` (None: what the model can hold).
    Raises ModelError for a directory that is none, code that was not allowed, or a head with another number of labels.
    """

    def __init__(self, base_model_name: str, num_labels: int = 1, dropout: float = 0.1, *, max_length: int | None = None,
                 batch_size: int = 16, device: str | torch.device = "cpu", dtype: str | torch.dtype = "auto", seed: int = 0,
                 trust_remote_code: bool = False):
        super().__init__()
        config = _check_directory(base_model_name, trust_remote_code)
        headed = any(str(a).endswith("ForSequenceClassification") for a in config.architectures or ())
        if headed and config.num_labels != num_labels:
            raise ModelError(f"{base_model_name!r} has a head with {config.num_labels} labels, num_labels is {num_labels}; "
                             f"pass num_labels={config.num_labels}")
        device = torch.device(device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, self.fresh_head = _load(base_model_name, config, num_labels, dropout, dtype=resolve_dtype(dtype, device),
                                           trust_remote_code=trust_remote_code)
        if self.fresh_head:
            warnings.warn(f"RewardModel: {base_model_name!r} has no reward head; a fresh one was started from seed {seed}. "
                          "Its scores mean nothing until it is trained", stacklevel=2)
        self._hold(model, load_tokenizer(base_model_name, trust_remote_code), str(base_model_name), num_labels, batch_size,
                   dropout, max_length)
        self.to(device)

    @classmethod
    def from_pretrained(cls, directory: str, **options) -> RewardModel:
        """Load what save_pretrained wrote, or any classifier directory, with the number of labels it has."""
        config = _check_directory(directory, options.get("trust_remote_code", False))
        return cls(directory, num_labels=options.pop("num_labels", _labels(directory, config)), **options)

    @classmethod
    def of(cls, model: nn.Module, tokenizer=None, batch_size: int = 16) -> RewardModel:
        """A loaded transformers sequence classifier; the tokenizer is that of the directory it came from unless given."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._hold(model, tokenizer or load_tokenizer(model.config._name_or_path), str(model.config._name_or_path),
                   model.config.num_labels, batch_size, 0.0, None)
        return self

    def _hold(self, model: nn.Module, tokenizer, name: str, num_labels: int, batch_size: int, dropout: float,
              max_length: int | None) -> None:
        self.model, self.tokenizer, self.name, self.num_labels = model, tokenizer, name, num_labels
        self.batch_size, self.truncated, self.dropout = batch_size, 0, nn.Dropout(dropout)
        rows = model.base_model.get_input_embeddings().weight.shape[0]
        if len(tokenizer) > rows:
            raise ModelError(f"{name!r}: the tokenizer has {len(tokenizer)} ids, the model only {rows} embedding rows")
        limits = [tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None)]
        known = [int(limit) for limit in limits if limit and limit < 10**9]  # a tokenizer without a limit says 10^30
        self.max_length = max_length or min(known, default=2048)
        self.eval()

    def save_pretrained(self, directory: str | Path) -> None:
        """Write model and tokenizer as a directory that from_pretrained (and, where it has the class, transformers) loads."""
        if isinstance(self.model, _Headed):
            self.model.base_model.save_pretrained(directory)
            save_file({"weight": self.model.score.weight.detach().contiguous().cpu()}, Path(directory) / _HEAD_FILE)
        else:
            self.model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Raw head outputs, float32 [S, num_labels], of int64 [S, L] ids; real tokens are where the mask is 1 (any side).

        Gradients flow when the module is in training mode and grad is enabled.
        """
        lengths_S = attention_mask.sum(1)
        order = attention_mask.argsort(dim=1, descending=True, stable=True)  # real tokens first: one layout for all models
        width = int(lengths_S.max())
        ids = input_ids.gather(1, order)[:, :width]
        mask = torch.arange(width, device=ids.device)[None] < lengths_S[:, None]
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0
        ids, mask = ids.masked_fill(~mask, pad), mask.long()
        head = getattr(self.model, "score", None)
        if not isinstance(head, nn.Module):  # encoders pool in a way of their own, blind to the padding behind the mask
            return self.model(input_ids=ids, attention_mask=mask).logits.float()
        hidden_SLD = self.model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
        last_SD = hidden_SLD[torch.arange(len(ids), device=ids.device), lengths_S - 1]
        return head(self.dropout(last_SD)).float()

    def encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text under this model's own tokenizer; too long ones keep their end and are counted."""
        self.tokenizer.truncation_side = "left"
        encoded = self.tokenizer(list(texts), add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        for i, ids in enumerate(encoded):
            if len(ids) > self.max_length:
                self.truncated += 1
                encoded[i] = self.tokenizer(texts[i], add_special_tokens=add_special_tokens, truncation=True,
                                            max_length=self.max_length)["input_ids"]
            elif not ids:  # an empty text without special tokens still needs one position to read from
                encoded[i] = [next(t for t in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id, 0) if t is not None)]
        return encoded

    @torch.no_grad()
    def score(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[float]:
        """One number a text, in order; batches of similar length, evaluation mode. Two labels: log-odds of the second."""
        if self.num_labels > 2:
            raise ModelError(f"{self.name!r} has {self.num_labels} labels; a score needs 1, or 2 (log-odds of the second)")
        encoded = self.encode(texts, add_special_tokens)
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
        scores, training = [0.0] * len(encoded), self.training
        device = next(self.parameters()).device
        self.eval()
        try:
            for start in range(0, len(order), self.batch_size):
                rows = order[start:start + self.batch_size]
                width = max(len(encoded[i]) for i in rows)
                ids = torch.tensor([encoded[i] + [0] * (width - len(encoded[i])) for i in rows], device=device)
                mask = torch.tensor([[1] * len(encoded[i]) + [0] * (width - len(encoded[i])) for i in rows], device=device)
                logits = self(ids, mask)
                values = logits[:, -1] if self.num_labels == 1 else logits[:, 1] - logits[:, 0]
                for i, value in zip(rows, values.tolist()):
                    scores[i] = value
        finally:
            self.train(training)
        return scores


def _labels(directory: str, config) -> int:
    head = Path(directory) / _HEAD_FILE
    if head.is_file():
        return load_file(head)["weight"].shape[0]
    return config.num_labels if any("SequenceClassification" in str(a) for a in config.architectures or ()) else 1


def _load(path: str, config, num_labels: int, dropout: float, **options) -> tuple[nn.Module, bool]:
    """(model with its head, whether the head is fresh)."""
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        model = _Headed(AutoModel.from_pretrained(path, **options), config.get_text_config().hidden_size, num_labels)
        model.to(options["dtype"])
        saved = Path(path) / _HEAD_FILE
        if saved.is_file():
            model.score.load_state_dict(load_file(saved))
        return model, not saved.is_file()
    config = AutoConfig.from_pretrained(path, num_labels=num_labels, trust_remote_code=options["trust_remote_code"])
    for key in ("classifier_dropout", "seq_classif_dropout"):
        if hasattr(config, key):
            setattr(config, key, dropout)
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(path, config=config, output_loading_info=True, **options)
    except Exception as error:
        raise ModelError(f"cannot load a sequence classifier from {path!r}: {error}") from error
    prefix = model.base_model_prefix + "."
    return model, any(not key.startswith(prefix) for key in info["missing_keys"])
