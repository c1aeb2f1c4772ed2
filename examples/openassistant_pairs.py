"""OpenAssistant's message trees as preference pairs: python examples/openassistant_pairs.py messages.jsonl pairs.jsonl

A row of messages.jsonl is one message: message_id, parent_id, text, role (prompter | assistant) and, for sibling replies, rank
(0 is the best). Each turn with two ranked replies or more gives one pair: the best reply against the worst.
"""

import json
import sys
from collections import defaultdict

source, target = sys.argv[1:]
with open(source, encoding="utf-8") as file:
    messages = {m["message_id"]: m for m in map(json.loads, file)}
replies = defaultdict(list)
for message in messages.values():
    if message["role"] == "assistant" and message.get("rank") is not None:
        replies[message["parent_id"]].append(message)


def chat(message: dict | None) -> list[dict]:
    """The conversation that ends with this message."""
    if message is None:
        return []
    role = "assistant" if message["role"] == "assistant" else "user"
    return [*chat(messages.get(message["parent_id"])), {"role": role, "content": message["text"]}]


with open(target, "w", encoding="utf-8") as file:
    for siblings in replies.values():
        best, *_, worst = sorted(siblings, key=lambda m: m["rank"]) if len(siblings) > 1 else (None, None)
        if best is not None:
            file.write(json.dumps({"chosen": chat(best), "rejected": chat(worst)}, ensure_ascii=False) + "\n")
