"""Ids and masks, against real tokenizers."""

import numpy as np
import pytest
from byte_tokenizers import SPECIAL, TEMPLATE, byte_tokenizer, trained_text

from verl.core.errors import ConfigError, DataError
from verl.data import DataConfig, as_tasks, describe_row, encode_answer, encode_messages, encode_prompt

PLAIN = DataConfig()
USER = {"role": "user", "content": "alpha"}
ANSWER = {"role": "assistant", "content": "beta"}
D019 = ("{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}")
MARKED = ("{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
          "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|assistant|>{% endif %}")
FORGETFUL = ("{% for m in messages %}<|{{ m.role }}|>"
             "{% if m.role == 'assistant' and not loop.last %}...{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
             "{% if add_generation_prompt %}<|assistant|>{% endif %}")


def one(row):
    return as_tasks([row])[0]


def answered(tokenizer, row, config=PLAIN, column="completion"):
    task = one(row)
    prompt, ids, mask = encode_answer(tokenizer, task, getattr(task, column), config)
    assert (prompt.dtype, ids.dtype, mask.dtype) == (np.int32, np.int32, bool) and len(ids) == len(mask)
    return tokenizer.decode(prompt), tokenizer.decode(ids), trained_text(tokenizer, ids, mask)


def test_exactly_one_bos_on_every_path():
    """Field case D019: three forms of one prompt; sampling, SFT, preference and reference share `encode_prompt`'s ids."""
    tokenizer = byte_tokenizer(template=D019)
    chat = one({"prompt": [{"role": "user", "content": "hi"}]})
    rendered = one({"prompt": "<s><|user|>hi<|end|><|assistant|>"})
    plain = one({"prompt": "hi"})
    ids = [encode_prompt(tokenizer, task, PLAIN).tolist() for task in (chat, rendered, plain)]
    for own, task in zip(ids, (chat, rendered, plain)):
        assert own.count(tokenizer.bos_token_id) == 1 and own[0] == tokenizer.bos_token_id
        answer = [ANSWER] if task.conversational else "beta"
        assert encode_answer(tokenizer, task, answer, PLAIN)[0].tolist() == own
    assert ids[0] == ids[1]
    assert tokenizer.decode(ids[2]) == "<s>hi"
    assert tokenizer.bos_token_id not in encode_prompt(byte_tokenizer(bos=False), plain, PLAIN)


def test_no_token_spans_the_border_of_prompt_and_answer():
    """Field case D008: " yes" is one token, but the prompt ends with the space."""
    tokenizer = byte_tokenizer(merges=[("A", ":"), ("e", "s"), ("y", "es"), ("Ġ", "yes")], bos=False)
    assert tokenizer.tokenize("A: yes") == ["A:", "Ġyes"]
    row = {"prompt": "A: ", "chosen": "yes", "rejected": "no"}
    prompt, ids, mask = encode_answer(tokenizer, one(row), "yes", PLAIN)
    assert tokenizer.convert_ids_to_tokens(prompt.tolist()) == ["A:", "Ġ"]
    assert tokenizer.convert_ids_to_tokens(ids.tolist()) == ["yes", "<|end|>"]
    assert mask.tolist() == [True, True]
    assert encode_answer(tokenizer, one(row), "no", PLAIN)[0].tolist() == prompt.tolist()
    assert encode_prompt(tokenizer, one(row), PLAIN).tolist() == prompt.tolist()


def test_every_border_of_a_conversation_is_safe():
    """Field case D008 inside a chat: the newline that opens an answer must not merge with the template's own."""
    tokenizer = byte_tokenizer(merges=[("Ċ", "Ċ")], template=TEMPLATE.replace("<|assistant|>{%", "<|assistant|>\n{%")
                               .replace("|>{{ m.content }}", "|>\n{{ m.content }}"))
    row = {"messages": [USER, {"role": "assistant", "content": "\nbeta"}, USER, ANSWER]}
    assert answered(tokenizer, row)[2] == "\nbeta<|end|>beta<|end|>"


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["prefixes", "generation blocks"])
def test_trained_tokens_of_a_conversation(template):
    """Field case D052: the assistant's words and end token, found with or without generation blocks."""
    tokenizer = byte_tokenizer(template=template)
    ids, mask = encode_messages(tokenizer, [USER, ANSWER], None, PLAIN)
    assert tokenizer.decode(ids) == "<s><|user|>alpha<|end|>\n<|assistant|>beta<|end|>"
    assert trained_text(tokenizer, ids, mask) == "beta<|end|>" and mask.sum() == 5
    both = [{"role": "system", "content": "s"}, USER, ANSWER, USER, {"role": "assistant", "content": ""}]
    ids, mask = encode_messages(tokenizer, both, None, PLAIN)
    assert trained_text(tokenizer, ids, mask) == "beta<|end|>" + ("<|end|>" if template is TEMPLATE else "")


def test_a_row_without_trained_tokens_is_an_error():
    """Field case D052: never a normal-looking loss over nothing."""
    blind = MARKED.replace("m.role == 'assistant'", "m.role == 'model'")
    with pytest.raises(DataError, match="messages: the tokenizer's chat template marks no token of .*generation"):
        encode_messages(byte_tokenizer(template=blind), [USER, ANSWER], None, PLAIN)
    with pytest.raises(DataError, match="data.chat_template marks no token"):
        encode_messages(byte_tokenizer(), [USER, ANSWER], None, DataConfig(chat_template=blind))


def test_tool_calls_read_back_from_columns():
    """Field case D074: numpy arrays of parquet render as JSON; calls stay in the history; tool output is not trained."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"xs": np.array([2, 3]), "y": None}}}
    turns = np.array([{"role": "user", "content": "add 2 and 3", "tool_calls": None},
                      {"role": "assistant", "content": "", "tool_calls": np.array([call], dtype=object)},
                      {"role": "tool", "content": "5", "tool_calls": None},
                      {"role": "assistant", "content": "It is 5.", "tool_calls": None}], dtype=object)
    tokenizer = byte_tokenizer()
    _, text, trained = answered(tokenizer, {"messages": turns})
    assert text == ('<s><|user|>add 2 and 3<|end|>\n<|assistant|>CALL add {"xs": [2, 3]}<|end|>\n<|tool|>5<|end|>\n'
                    '<|assistant|>It is 5.<|end|>')
    assert trained == 'CALL add {"xs": [2, 3]}<|end|>It is 5.<|end|>'
    prompt, text, again = answered(tokenizer, {"prompt": turns[:1], "completion": turns[1:]})
    assert prompt == "<s><|user|>add 2 and 3<|end|>\n<|assistant|>" and again == trained
    history = encode_prompt(tokenizer, one({"prompt": turns[:3]}), PLAIN)
    assert 'CALL add {"xs": [2, 3]}' in tokenizer.decode(history)


def test_tools_reach_the_template_without_fillers():
    """Field case D063: the rendered tool list holds what the row holds."""
    row = {"prompt": [USER], "tools": [{"name": "f", "parameters": {"x": "int"}}]}
    text = byte_tokenizer().decode(encode_prompt(byte_tokenizer(), one(row), PLAIN))
    assert '<|system|>[{"name": "f", "parameters": {"x": "int"}}]<|end|>' in text


def test_raw_strings():
    tokenizer = byte_tokenizer()
    assert answered(tokenizer, {"prompt": "q ", "completion": "a"}) == ("<s>q ", "a<|end|>", "a<|end|>")
    assert answered(tokenizer, {"prompt": "q", "completion": "a<|end|>"}) == ("<s>q", "a<|end|>", "a<|end|>")
    assert answered(tokenizer, {"prompt": "q", "completion": ""})[1:] == ("<|end|>", "<|end|>")
    assert answered(tokenizer, {"text": "all"}) == ("<s>", "all<|end|>", "all<|end|>")
    assert answered(byte_tokenizer(bos=False), {"text": "all"}) == ("", "all<|end|>", "ll<|end|>")
    with pytest.raises(DataError, match="write both alike"):
        encode_answer(tokenizer, one({"prompt": "q"}), [ANSWER], PLAIN)
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="has no EOS token"):
        answered(tokenizer, {"prompt": "q", "completion": "a"})


def test_text_whose_characters_span_tokens_comes_back_whole():
    """Field case D036, where prompts and answers are concerned: ids are cut anywhere, whole decodes are exact."""
    tokenizer, text = byte_tokenizer(bos=False), "ok 🙂 é 你"
    assert answered(tokenizer, {"prompt": text, "completion": text})[:2] == (text, text + "<|end|>")
    cut = encode_prompt(tokenizer, one({"prompt": text}), DataConfig(max_prompt_tokens=5, overlong="truncate_left"))
    assert len(cut) == 5 and tokenizer.decode(cut).endswith("你")


def test_strings_as_chat():
    tokenizer = byte_tokenizer()
    row = {"prompt": "alpha", "completion": "beta"}
    chat = {"prompt": [USER], "completion": [ANSWER]}
    assert answered(tokenizer, row, DataConfig(template="chat")) == answered(tokenizer, chat)
    with_system = answered(tokenizer, row, DataConfig(system_prompt="be brief"))
    assert with_system[0] == "<s><|system|>be brief<|end|>\n<|user|>alpha<|end|>\n<|assistant|>"
    assert answered(tokenizer, chat, DataConfig(system_prompt="be brief")) == with_system
    own = {"prompt": [{"role": "system", "content": "mine"}, USER], "completion": [ANSWER]}
    assert "be brief" not in answered(tokenizer, own, DataConfig(system_prompt="be brief"))[0]
    with pytest.raises(DataError, match="data.template is raw, but the prompt is chat messages"):
        answered(tokenizer, chat, DataConfig(template="raw"))


def test_a_message_the_assistant_began_is_continued():
    begun = {"role": "assistant", "content": "The answer"}
    row = {"prompt": [USER, begun], "completion": [{"role": "assistant", "content": " is 4"}]}
    assert answered(byte_tokenizer(), row) == (
        "<s><|user|>alpha<|end|>\n<|assistant|>The answer", " is 4<|end|>", " is 4<|end|>")


def test_template_without_an_end_token_gets_eos():
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" \
               "{% if add_generation_prompt %}assistant: {% endif %}"
    assert answered(byte_tokenizer(template=template), {"prompt": [USER], "completion": [ANSWER]}) == (
        "user: alpha\nassistant: ", "beta\n<|end|>", "beta\n<|end|>")


def test_template_that_rewrites_history():
    """A template that renders earlier turns differently: refused for whole conversations, fine for one answer."""
    tokenizer = byte_tokenizer(template=FORGETFUL)
    assert answered(tokenizer, {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]})[2] == "beta<|end|>"
    with pytest.raises(DataError, match=r"renders the beginning of this conversation differently.*\{% generation %\}"):
        encode_messages(tokenizer, [USER, ANSWER, USER, ANSWER], None, PLAIN)


def test_an_eos_that_ends_whole_conversations_only():
    """Phi-3's and gpt-oss's habit: the last turn ends in another token than the ones before."""
    template = ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ '<|tool|>' if not loop.last }}{% endfor %}"
                "{% if add_generation_prompt %}<|tool|><|assistant|>{% else %}{{ eos_token }}{% endif %}")
    tokenizer = byte_tokenizer(template=template)
    ids, mask = encode_messages(tokenizer, [USER, ANSWER, USER, ANSWER], None, PLAIN)
    assert tokenizer.decode(ids) == ("<|user|>alpha<|tool|><|assistant|>beta<|tool|><|user|>alpha<|tool|><|assistant|>"
                                     "beta<|end|>")
    assert trained_text(tokenizer, ids, mask) == "beta<|tool|>beta<|end|>"


@pytest.mark.parametrize("row, what", [
    ({"prompt": [USER], "tools": [{"name": "f"}]}, "tools"),
    ({"prompt": [USER, {**ANSWER, "tool_calls": [{"name": "f", "arguments": {}}]}, USER]}, "tool_calls"),
])
def test_nothing_is_left_out_by_a_template_that_does_not_know_it(row, what):
    """Field case D028's reason: a model must not train on calls to tools it was never shown."""
    with pytest.raises(DataError, match=f"the tokenizer's chat template leaves out {what}; set data.chat_template"):
        encode_prompt(byte_tokenizer(template=D019), one(row), PLAIN)
    for_parts = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}<|end|>{% endfor %}"
    with pytest.raises(DataError, match="leaves out message text"):
        encode_prompt(byte_tokenizer(template=for_parts), one({"prompt": [USER]}), PLAIN)


def test_templates_from_the_config(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{% for m in messages %}[{{ m.content }}{{ mood }}]{% endfor %}")
    config = DataConfig(chat_template=str(path), template_kwargs={"mood": "!"})
    row = {"prompt": [USER]}
    assert byte_tokenizer().decode(encode_prompt(byte_tokenizer(), one(row), config)) == "[alpha!]"
    row["chat_template_kwargs"] = {"mood": "?"}
    assert byte_tokenizer().decode(encode_prompt(byte_tokenizer(), one(row), config)) == "[alpha?]"
    bare = byte_tokenizer(template=None)
    assert bare.decode(encode_prompt(bare, one(row), config)) == "[alpha?]"
    with pytest.raises(DataError, match="has no chat template; set data.chat_template to a Jinja file"):
        encode_prompt(bare, one(row), PLAIN)
    with pytest.raises(ConfigError, match="neither a file"):
        encode_prompt(bare, one(row), DataConfig(chat_template="missing.jinja"))
    refusing = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"task rows-0: .* cannot render roles \['user'\]: roles must alternate"):
        encode_prompt(bare, one(row), DataConfig(chat_template=refusing))
    with pytest.raises(DataError, match="begins with the assistant"):
        encode_messages(byte_tokenizer(), [ANSWER, USER, ANSWER], None, PLAIN)


def test_over_long_prompts():
    """Field case D032: what is sampled from and what is trained on are the same last 8 ids, or nothing."""
    tokenizer, task = byte_tokenizer(bos=False), one({"prompt": "0123456789ab", "completion": "y"})
    cut = DataConfig(max_prompt_tokens=8, overlong="truncate_left")
    assert tokenizer.decode(encode_prompt(tokenizer, task, cut)) == "456789ab"
    assert encode_answer(tokenizer, task, "y", cut)[0].tolist() == encode_prompt(tokenizer, task, cut).tolist()
    for encode in (lambda c: encode_prompt(tokenizer, task, c), lambda c: encode_answer(tokenizer, task, "y", c)):
        with pytest.raises(DataError, match=r"task rows-0: .* 12 > 8 \(data.max_prompt_tokens\)"):
            encode(DataConfig(max_prompt_tokens=8))


def test_a_prompt_without_tokens():
    with pytest.raises(DataError, match="the prompt has no tokens"):
        encode_prompt(byte_tokenizer(), one({"prompt": [{"role": "user", "content": " "}]}),
                      DataConfig(chat_template="{{ messages[0].content | trim }}"))


def test_described_rows_show_ids_text_and_mask():
    tokenizer = byte_tokenizer()
    text = describe_row(tokenizer, one({"prompt": "q", "chosen": "a", "rejected": "b", "margin": 1}), PLAIN)
    star, end = tokenizer.convert_tokens_to_ids("a"), SPECIAL.index("<|end|>")
    assert text.splitlines() == [
        "task rows-0", "prompt: 2 tokens, 0 trained", "         0  '<s>'",
        f"  {tokenizer.convert_tokens_to_ids('q'):>8}  'q'", "chosen: 2 tokens, 2 trained", f"* {star:>8}  'a'",
        f"* {end:>8}  '<|end|>'", "rejected: 2 tokens, 2 trained", f"* {star + 1:>8}  'b'", f"* {end:>8}  '<|end|>'",
        "columns {'margin': 1}"]
    assert describe_row(tokenizer, one({"prompt": "q"}), PLAIN).splitlines()[1] == "prompt: 2 tokens, 0 trained"
