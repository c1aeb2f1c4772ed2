"""Real tokenizers small enough to read: one id a byte, plus the special tokens of a chat."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"]
TEMPLATE = ("{{ bos_token }}{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
            "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
            "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")


def byte_tokenizer(merges=(), template=TEMPLATE, bos=True):
    """A byte-level BPE tokenizer with these merges; `bos` makes it put <s> before text, as Llama's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = SPECIAL + alphabet + ["".join(m) for m in merges]
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    if bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="<|end|>")
    made.chat_template = template
    return made


def trained_text(tokenizer, ids, mask):
    """The text of the trained tokens."""
    return tokenizer.decode([i for i, on in zip(ids.tolist(), mask.tolist()) if on])
