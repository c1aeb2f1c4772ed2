"""Tiny real model directories: a byte-pair tokenizer trained on the spot, and models from transformers configs."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

TEXTS = ["the answer is four", "the question was two plus two", "good and bad answers", "\u4f60\u597d"]
CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"


def tokenizer(kind, directory, **options):
    """kind "bert" wraps in [CLS] ... [SEP]; "llama" begins with <s>; pad is </s> there, as in many a directory."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["[PAD]", "[CLS]", "[SEP]"] if kind == "bert" else ["<s>", "</s>"]
    bpe.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=320, special_tokens=special,
                                                       initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    ids = {token: bpe.token_to_id(token) for token in special}
    single = "[CLS] $A [SEP]" if kind == "bert" else "<s> $A"
    bpe.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(ids.items()))
    names = ({"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"} if kind == "bert" else
             {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"})
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, **names, **options)
    made.save_pretrained(directory)
    return made


SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 400}


def build(kind, directory, seed=0, labels=1, **options):
    """A model directory of one of: bert, bert-base, llama, llama-base, gpt2."""
    torch.manual_seed(seed)
    family = "bert" if kind.startswith("bert") else "llama"
    made = tokenizer(family, directory, **options)
    if family == "bert":
        config = BertConfig(**SIZE, max_position_embeddings=64, num_labels=labels)
        model = (BertModel if kind == "bert-base" else BertForSequenceClassification)(config)
    elif kind == "gpt2":
        model = GPT2ForSequenceClassification(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, vocab_size=400,
                                                         num_labels=labels, pad_token_id=made.pad_token_id))
    else:
        config = LlamaConfig(**SIZE, num_key_value_heads=2, max_position_embeddings=64, num_labels=labels,
                             pad_token_id=made.pad_token_id)
        model = (LlamaForCausalLM if kind == "llama-base" else LlamaForSequenceClassification)(config)
    for parameter in model.parameters():  # tell the texts apart: the stock initialisation is close to constant
        torch.nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else None
    model.save_pretrained(directory)
    return str(directory)
