"""Train the small model that ships with nanoapc, from a text file to a model directory, on a CPU.

    python examples/train_embedded_model.py --text tinyshakespeare.txt --out my_model

A lesson in four steps, each a few functions: (1) a byte-level BPE tokenizer, (2) two streams of training tokens, the
plain text and the same speeches dressed as chats, (3) a Qwen3 model that reads rows cut from the streams, (4) a
directory that any engine for Hugging Face models can load, with a README of what was measured.

Invariant: the held-out text (the last tenth) reaches neither the tokenizer nor a training row; it is used to measure,
and to pick the checkpoint that is kept.

The text is a play: speeches separated by empty lines, each one "NAME:" and then its lines.
"""

from __future__ import annotations

import argparse
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

END_OF_TEXT, IM_START, IM_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MAX_LENGTH = 2048  # tokens the model can read at once
ROW_LENGTHS = (256, 512, 1024, MAX_LENGTH)  # one of them per step, so that every position is trained
EVAL_LENGTH = 512
CHAT_SHARE = 0.3  # of the rows

# ---- 1. the tokenizer


def train_tokenizer(text: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: the 256 bytes are entries, so that any UTF-8 text can be encoded; merges are learned from `text`."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


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
    ends_line = {i for token, i in tokenizer.get_vocab().items() if token.endswith("Ċ")}  # byte-level BPE's newline
    starts = [0] + [i + 1 for i, token in enumerate(ids[:-1]) if token in ends_line]
    return Stream(torch.tensor(ids), torch.tensor(starts), len(text.encode()))


def chat_stream(text: str, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Stream:
    """Runs of 2, 4 or 6 speeches as user and assistant in turn; a row may start where a conversation starts.

    Where all of the assistant's speeches are one person's, half of the conversations open with a system message that
    says so. Every answer ends with <|im_end|>: this is how the model learns to stop.
    """
    speeches = re.findall(r"^([A-Z][^\n:]*):\n(.+?)(?=\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    rendered = []
    for first in range(len(speeches) - 6):
        turns = speeches[first : first + rng.choice((2, 2, 4, 6))]
        messages = [
            {"role": "assistant" if i % 2 else "user", "content": said} for i, (_, said) in enumerate(turns)
        ]
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
    length = ROW_LENGTHS[int(torch.randint(len(ROW_LENGTHS), (), generator=generator))]
    rows = []
    for _ in range(tokens_per_step // length):
        stream = streams[int(torch.rand((), generator=generator) < CHAT_SHARE)]
        start = int(stream.starts[torch.randint(len(stream.starts), (), generator=generator)])
        start = min(start, len(stream.tokens) - length - 1)
        rows.append(stream.tokens[start : start + length + 1])
    return torch.stack(rows)


# ---- 3. the model and its training


def build_model(vocab_size: int) -> Qwen3ForCausalLM:
    """A Qwen3 of about 3.4 million parameters: the output layer is the embedding, two heads share one K/V head."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[SPECIAL_TOKENS.index(IM_END), SPECIAL_TOKENS.index(END_OF_TEXT)],
        pad_token_id=SPECIAL_TOKENS.index(END_OF_TEXT),
    )
    return Qwen3ForCausalLM(config)


def add_dropout(model: Qwen3ForCausalLM, probability: float) -> None:
    """Drop activations where they enter the residual stream, in training only. Qwen3 itself has no dropout; a text
    this short needs it: without it the model learns the text by heart within a few epochs."""

    def drop(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return dropout(output, probability, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)


def loss_sum(model: Qwen3ForCausalLM, rows: Tensor) -> Tensor:
    """Sum over the rows' predictions of -ln P(next token), a float32 scalar. rows [num_rows, length + 1] int64."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(rows[:, :-1], use_cache=False).logits  # [num_rows, length, vocab_size]
    return cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")


@torch.inference_mode()
def measure(model: Qwen3ForCausalLM, stream: Stream) -> tuple[float, float]:
    """(nats per token, bits per byte) of a stream, read in windows of EVAL_LENGTH tokens."""
    model.eval()
    num_windows = (len(stream.tokens) - 1) // EVAL_LENGTH
    windows = stream.tokens[: num_windows * EVAL_LENGTH + 1].unfold(0, EVAL_LENGTH + 1, EVAL_LENGTH)
    per_token = sum(loss_sum(model, rows).item() for rows in windows.split(8)) / (num_windows * EVAL_LENGTH)
    model.train()
    return per_token, per_token / math.log(2) * len(stream.tokens) / stream.num_bytes


def learning_rate(step: int, num_steps: int, peak: float) -> float:
    """Linear warm-up over the first 5 %, then half a cosine down to zero."""
    warmup = max(1, num_steps // 20)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (num_steps - warmup)))


def train(model: Qwen3ForCausalLM, streams: tuple[Stream, Stream], held_out: Stream, args: argparse.Namespace) -> int:
    """Train in place, end with the weights that were best on the held-out text; returns the step they are from."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]  # the norms' weights: no decay
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(args.seed)
    best_loss, best_step, best_weights = math.inf, 0, {}
    began = time.perf_counter()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        rows = draw_rows(streams, args.tokens_per_step, generator)
        loss = loss_sum(model, rows) / rows[:, 1:].numel()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % args.eval_every == 0 or step + 1 == args.steps:
            held_out_loss, bits = measure(model, held_out)
            print(
                f"step {step + 1:5d}  {time.perf_counter() - began:6.0f} s  batch loss {loss.item():.3f}  "
                f"held-out loss {held_out_loss:.3f} ({bits:.3f} bits per byte)",
                flush=True,
            )
            if held_out_loss < best_loss:
                best_loss, best_step = held_out_loss, step + 1
                best_weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.load_state_dict(best_weights)
    return best_step


# ---- 4. the model directory


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Weights in bfloat16, config, generation config and tokenizer; the chat template is in tokenizer_config.json."""
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out, save_jinja_files=False)
    (out / "model.safetensors").chmod(0o644)


def generate(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, num_tokens: int) -> str:
    """A sampled continuation of `prompt`, special tokens left out."""
    inputs = tokenizer(prompt, return_tensors="pt")
    out = model.generate(
        **inputs, max_new_tokens=num_tokens, do_sample=True, temperature=0.8, top_k=50, top_p=1.0
    )
    return str(tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))


README = """\
# The model that ships with nanoapc

A Qwen3 of {parameters:,} parameters ({num_layers} layers, hidden size {hidden}, {heads} heads, {kv_heads} K/V heads, \
bfloat16) with a byte-level
BPE tokenizer of {vocab:,} entries, together {megabytes:.1f} MB. It reads up to {max_length:,} tokens. It writes
Shakespeare-like dialogue and knows nothing else: it is here so that everything in this project can run on a real
model at once, without a download.

Made by `examples/train_embedded_model.py` from `{text_name}` (Shakespeare's plays, in the public domain; the text is not
part of this project), {steps:,} steps of {tokens_per_step:,} tokens, seed {seed}, in {minutes:.0f} minutes on {threads} CPU \
thread(s). Kept: the weights of step {best_step:,},
the best on the held-out text. That is the last tenth of the file, seen by neither the tokenizer nor the training.

| loss of these bfloat16 weights, windows of {eval_length} tokens | nats per token | bits per byte |
|---|---|---|
{losses}

## Text

Prompt `ROMEO:`, temperature 0.8, top_k 50:

```
ROMEO:{sample}
```

## Chat

The chat template puts each message between `<|im_start|>` and `<|im_end|>`. A share of the training rows were speeches
dressed as user and assistant in turn, so that the model answers a speech with a speech and ends it by itself. A system
message `Answer as NAME.` was part of some of them. To "{question}" it says:

```
{answer}
```
"""


def write_readme(out: Path, streams: dict[str, Stream], best_step: int, minutes: float, args: argparse.Namespace) -> None:
    """Load the directory as a user would, measure it, let it speak, and write its README.md."""
    model = Qwen3ForCausalLM.from_pretrained(out)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    losses = []
    for name, stream in streams.items():
        per_token, bits = measure(model, stream)
        losses.append(f"| {name} | {per_token:.3f} | {bits:.3f} |")
    model.eval()
    torch.manual_seed(args.seed)
    question = "What news from the king?"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    text = README.format(
        parameters=model.num_parameters(),
        num_layers=model.config.num_hidden_layers,
        hidden=model.config.hidden_size,
        heads=model.config.num_attention_heads,
        kv_heads=model.config.num_key_value_heads,
        vocab=len(tokenizer),
        megabytes=sum(file.stat().st_size for file in out.iterdir()) / 1e6,
        max_length=MAX_LENGTH,
        text_name=args.text.name,
        steps=args.steps,
        tokens_per_step=args.tokens_per_step,
        seed=args.seed,
        minutes=minutes,
        threads=args.threads,
        best_step=best_step,
        eval_length=EVAL_LENGTH,
        losses="\n".join(losses),
        sample=generate(model, tokenizer, "ROMEO:", 200),
        question=question,
        answer=generate(model, tokenizer, str(chat), 200),
    )
    (out / "README.md").write_text(text, encoding="utf-8")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the model that ships with nanoapc.")
    parser.add_argument("--text", type=Path, required=True, help="the plays, one UTF-8 text file")
    parser.add_argument("--out", type=Path, required=True, help="the model directory to write")
    parser.add_argument("--steps", type=int, default=2300)
    parser.add_argument("--tokens-per-step", type=int, default=4096, help=f"at least {MAX_LENGTH}")
    parser.add_argument("--vocab-size", type=int, default=1024, help="tokenizer entries, 259 or more")
    parser.add_argument("--lr", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.15)
    parser.add_argument("--eval-every", type=int, default=100, help="steps between two looks at the held-out text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.tokens_per_step < MAX_LENGTH:
        parser.error(f"--tokens-per-step {args.tokens_per_step}: a row can be {MAX_LENGTH} tokens, give at least that")
    if not args.text.is_file():
        parser.error(f"--text {args.text}: no such file")

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    train_text, held_out_text = split_text(args.text.read_text(encoding="utf-8"))
    tokenizer = train_tokenizer(train_text, args.vocab_size)
    streams = (plain_stream(train_text, tokenizer), chat_stream(train_text, tokenizer, rng))
    held_out = plain_stream(held_out_text, tokenizer)
    model = build_model(len(tokenizer))
    add_dropout(model, args.dropout)
    print(
        f"{model.num_parameters():,} parameters, {len(tokenizer):,} entries; training on {len(streams[0].tokens):,} tokens "
        f"of text and {len(streams[1].tokens):,} of chats, held out {len(held_out.tokens):,}"
    )
    began = time.perf_counter()
    best_step = train(model, streams, held_out, args)
    save(model, tokenizer, args.out)
    measured = {
        "training text (its first part, as long as the held-out text)": plain_stream(
            train_text[: len(held_out_text)], tokenizer
        ),
        "held-out text": held_out,
        "held-out text as chats": chat_stream(held_out_text, tokenizer, rng),
    }
    write_readme(args.out, measured, best_step, (time.perf_counter() - began) / 60, args)


if __name__ == "__main__":
    main()
