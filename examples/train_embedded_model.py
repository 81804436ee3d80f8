"""Train the small model that ships with nanoapc, from a text file to a model directory, on a CPU.

    python examples/train_embedded_model.py --text tinyshakespeare.txt --out my_model

A lesson in four steps: (1) a byte-level BPE tokenizer, (2) two streams of tokens, the plain text and the same
speeches dressed as chats, (3) a Qwen3 model that reads rows cut from the streams, (4) a directory that any engine for
Hugging Face models can load, with a README of what was measured.

The text is a play: speeches separated by empty lines, each one "NAME:" and then its lines. Invariant: its last tenth
reaches neither the tokenizer nor a training row; it serves to measure, and to pick the weights that are kept.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # ids 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MAX_LENGTH = 2048  # tokens the model can read at once
ROW_LENGTHS = (256, 512, 1024, MAX_LENGTH)  # one of them per step: every position is trained, ...
ROW_LENGTH_WEIGHTS = (8.0, 4.0, 2.0, 1.0)  # ... the near ones more often
EVAL_EVERY, EVAL_LENGTH = 100, 512  # steps, tokens
VOCAB_SIZE, WEIGHT_DECAY = 1024, 0.1
CHAT_SHARE = 0.3  # of the rows


# ---- 1. the tokenizer
def train_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE: the 256 bytes are entries, so any UTF-8 text can be encoded; `text` teaches the merges."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([text], trainer)
    special = {"eos_token": IM_END, "pad_token": END_OF_TEXT, "additional_special_tokens": [IM_START]}
    behaviour = {"chat_template": CHAT_TEMPLATE, "clean_up_tokenization_spaces": False, "model_max_length": MAX_LENGTH}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **special, **behaviour)


# ---- 2. the data
def split_text(text: str, held_out: float = 0.1) -> tuple[str, str]:
    """(training text, held-out text): the last `held_out` of the file, cut where a speech ends."""
    cut = text.index("\n\n", int(len(text) * (1 - held_out))) + 2
    return text[:cut], text[cut:]


@dataclass
class Stream:
    """Tokens one after the other, and the places where a row may start."""

    tokens: Tensor  # [num_tokens] int64
    starts: Tensor  # [num_starts] int64
    num_bytes: int  # of the text that the tokens stand for


def plain_stream(text: str, tokenizer: PreTrainedTokenizerFast) -> Stream:
    """The text as it is; a row may start where a line starts."""
    ids = tokenizer(text, verbose=False).input_ids
    newlines = {i for token, i in tokenizer.get_vocab().items() if token.endswith("Ċ")}  # byte-level BPE's "\n"
    starts = [0] + [i + 1 for i, token in enumerate(ids[:-1]) if token in newlines]
    return Stream(torch.tensor(ids), torch.tensor(starts), len(text.encode()))


def chat_stream(text: str, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Stream:
    """Runs of 2, 4 or 6 speeches as user and assistant in turn; a row may start where a conversation starts.

    Where all of the assistant's speeches are one person's, half of the conversations open with a system message
    that says so. Every answer ends with <|im_end|>: this is how the model learns to stop.
    """
    speeches = re.findall(r"^([A-Z][^\n:]*):\n(.+?)(?=\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    rendered = []
    for first in range(len(speeches) - 6):
        turns = speeches[first : first + rng.choice((2, 2, 4, 6))]
        messages = [{"role": ("user", "assistant")[i % 2], "content": said} for i, (_, said) in enumerate(turns)]
        answering = {name for name, _ in turns[1::2]}
        if len(answering) == 1 and rng.random() < 0.5:
            messages.insert(0, {"role": "system", "content": f"Answer as {answering.pop()}."})
        rendered.append(str(tokenizer.apply_chat_template(messages, tokenize=False)) + END_OF_TEXT)
    rng.shuffle(rendered)  # neighbours share speeches: in one row they would teach copying
    conversations = tokenizer(rendered, verbose=False).input_ids
    lengths = torch.tensor([len(ids) for ids in conversations])
    tokens = torch.tensor([token for ids in conversations for token in ids])
    return Stream(tokens, lengths.cumsum(0) - lengths, len("".join(rendered).encode()))


def draw_rows(streams: tuple[Stream, Stream], tokens_per_step: int, generator: torch.Generator) -> Tensor:
    """One step's rows, [num_rows, length + 1] int64: plain text, and chats for CHAT_SHARE of them."""
    length = ROW_LENGTHS[int(torch.multinomial(torch.tensor(ROW_LENGTH_WEIGHTS), 1, generator=generator))]
    rows = []
    for _ in range(tokens_per_step // length):
        stream = streams[int(torch.rand((), generator=generator) < CHAT_SHARE)]
        start = int(stream.starts[torch.randint(len(stream.starts), (), generator=generator)])
        start = min(start, len(stream.tokens) - length - 1)
        rows.append(stream.tokens[start : start + length + 1])
    return torch.stack(rows)


# ---- 3. the model and its training
def build_model() -> Qwen3ForCausalLM:
    """A Qwen3 of 3.4 million parameters: the output layer is the embedding, two heads share one K/V head."""
    shape = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 768, "vocab_size": VOCAB_SIZE}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    reach = {"max_position_embeddings": MAX_LENGTH, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    special = {"bos_token_id": None, "eos_token_id": [2, 0], "pad_token_id": 0}
    config = Qwen3Config(**shape, **heads, **reach, **special, tie_word_embeddings=True)
    return Qwen3ForCausalLM(config)


def add_dropout(model: Qwen3ForCausalLM, probability: float) -> None:
    """Drop activations that enter the residual stream, in training only: else the text is learned by heart."""

    def drop(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return dropout(output, probability, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)


def loss_sum(model: Qwen3ForCausalLM, rows: Tensor) -> Tensor:
    """Sum over all predictions of -ln P(next token), a float32 scalar. rows [num_rows, length + 1] int64."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(rows[:, :-1], use_cache=False).logits  # [num_rows, length, vocab_size]
    return cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")


@torch.inference_mode()
def measure(model: Qwen3ForCausalLM, stream: Stream) -> tuple[float, float]:
    """(nats per token, bits per byte) of a stream, read in windows of EVAL_LENGTH tokens."""
    model.eval()
    num_windows = (len(stream.tokens) - 1) // EVAL_LENGTH
    windows = stream.tokens[: num_windows * EVAL_LENGTH + 1].unfold(0, EVAL_LENGTH + 1, EVAL_LENGTH)
    nats = sum(loss_sum(model, rows).item() for rows in windows.split(8)) / (num_windows * EVAL_LENGTH)
    model.train()
    return nats, nats / math.log(2) * len(stream.tokens) / stream.num_bytes


def learning_rate(step: int, num_steps: int, peak: float) -> float:
    """Linear warm-up over the first 5 %, then half a cosine down to zero."""
    warmup = max(1, num_steps // 20)
    cosine = math.cos(math.pi * max(0, step - warmup) / (num_steps - warmup))
    return peak * min(1.0, (step + 1) / warmup) * 0.5 * (1 + cosine)


def build_optimizers(model: Qwen3ForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and, without decay, for the norms' weights.

    Muon moves every direction of a matrix by the same amount. In 200 steps of 2,048 tokens it reached a training loss
    of 3.8, AdamW alone of 4.5.
    """
    embedding = model.model.embed_tokens.weight
    matrices = [p for p in model.parameters() if p.dim() == 2 and p is not embedding]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": [embedding], "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))]


def train_step(model: Qwen3ForCausalLM, optimizers: list[torch.optim.Optimizer], rows: Tensor, lr: float) -> float:
    """One step of every optimizer; returns the loss per token before it."""
    loss = loss_sum(model, rows) / rows[:, 1:].numel()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


# ---- 4. the model directory
def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Weights in bfloat16, config, generation config, and the tokenizer with the chat template in its config."""
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    rounded.generation_config = GenerationConfig(eos_token_id=[2, 0], pad_token_id=0)
    rounded.save_pretrained(out)
    tokenizer.save_pretrained(out, save_jinja_files=False)
    (out / "model.safetensors").chmod(0o644)  # it is written readable to its owner only


def continue_text(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """Up to 200 sampled tokens after `prompt`, special tokens left out."""
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=200, do_sample=True, temperature=0.8, top_k=50)
    return str(tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)).rstrip()


def write_readme(streams: dict[str, Stream], best_step: int, args: argparse.Namespace) -> None:
    """Load the directory as a user would, measure it, let it speak, and write its README.md."""
    model = Qwen3ForCausalLM.from_pretrained(args.out)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out)
    losses = ["| {} | {:.3f} | {:.3f} |".format(name, *measure(model, streams[name])) for name in streams]
    model.eval()
    torch.manual_seed(args.seed)
    question = [{"role": "user", "content": "What news from the king?"}]
    chat = str(tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True))
    shape, megabytes = model.config, sum(file.stat().st_size for file in args.out.iterdir()) / 1e6
    text = f"""\
# The model that ships with nanoapc

A Qwen3 of {model.num_parameters():,} parameters ({shape.num_hidden_layers} layers, hidden size {shape.hidden_size}, \
{shape.num_attention_heads} heads, {shape.num_key_value_heads} K/V heads, bfloat16)
with a byte-level BPE tokenizer of {VOCAB_SIZE:,} entries, {megabytes:.1f} MB. It reads up to {MAX_LENGTH:,} tokens.
It writes dialogue in Shakespeare's manner and knows nothing else: it is here so that everything in this project runs
on a real model at once, without a download.

Made by `examples/train_embedded_model.py` from `{args.text.name}` (plays by Shakespeare, in the public domain; the
text is not part of this project): {args.steps:,} steps of {args.tokens_per_step:,} tokens, seed {args.seed}.
The weights of step {best_step:,} did best on the held-out text: the last tenth, kept from tokenizer and training.

| loss of these weights, in windows of {EVAL_LENGTH} tokens | nats per token | bits per byte |
|---|---|---|
{chr(10).join(losses)}

After the prompt `ROMEO:`, at temperature 0.8 and top_k 50, it writes:
```
ROMEO:{continue_text(model, tokenizer, "ROMEO:")}
```

Part of the training rows were speeches dressed as user and assistant in turn by the chat template, so the model
answers a speech with a speech and ends it by itself. A system message `Answer as NAME.` names the speaker, if one is
wanted. To "{question[0]["content"]}" it says:
```
{continue_text(model, tokenizer, chat)}
```
"""
    (args.out / "README.md").write_text(text, encoding="utf-8")
    print(text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the model that ships with nanoapc.")
    parser.add_argument("--text", type=Path, required=True, help="the plays, one UTF-8 text file")
    parser.add_argument("--out", type=Path, required=True, help="the model directory to write")
    defaults = {"steps": 1000, "tokens-per-step": 4096, "lr": 4e-3, "dropout": 0.1, "seed": 0, "threads": 1}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"(default: {default})")
    args = parser.parse_args()
    if args.tokens_per_step < MAX_LENGTH:
        parser.error(f"--tokens-per-step {args.tokens_per_step}: a row has up to {MAX_LENGTH} tokens, give as many")
    return args


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng, generator = random.Random(args.seed), torch.Generator().manual_seed(args.seed)
    train_text, held_out_text = split_text(args.text.read_text(encoding="utf-8"))
    tokenizer = train_tokenizer(train_text)
    streams = (plain_stream(train_text, tokenizer), chat_stream(train_text, tokenizer, rng))
    held_out = plain_stream(held_out_text, tokenizer)
    model = build_model()
    add_dropout(model, args.dropout)
    optimizers = build_optimizers(model, args.lr)
    print(f"{model.num_parameters():,} parameters, {len(streams[0].tokens):,} tokens of text")
    best_loss, best_step, began = math.inf, 0, time.perf_counter()
    for step in range(1, args.steps + 1):
        rows = draw_rows(streams, args.tokens_per_step, generator)
        loss = train_step(model, optimizers, rows, learning_rate(step - 1, args.steps, args.lr))
        if step % EVAL_EVERY == 0 or step == args.steps:
            nats, bits = measure(model, held_out)
            print(f"step {step:5d} {time.perf_counter() - began:6.0f} s  loss of the step's rows {loss:.3f}  ", end="")
            print(f"held-out text {nats:.3f} nats per token, {bits:.3f} bits per byte", flush=True)
            if nats < best_loss:  # args.out always holds the best so far
                best_loss, best_step = nats, step
                save(model, tokenizer, args.out)
    seen = plain_stream(train_text[: len(held_out_text)], tokenizer)
    chats = chat_stream(held_out_text, tokenizer, rng)
    measured = {"training text (its first tenth)": seen, "held-out text": held_out, "held-out chats": chats}
    write_readme(measured, best_step, args)


if __name__ == "__main__":
    main()
