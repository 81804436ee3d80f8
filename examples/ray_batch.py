"""A dataset on several workers: Ray Data, one LLM in each worker, every prefix on one of them.

    pip install 'nanoapc[ray]'
    python examples/ray_batch.py                          # two CPU workers on this machine
    RAY_ADDRESS=auto python examples/ray_batch.py --model Qwen/Qwen3-0.6B --workers 8 --gpus 1

On a cluster, nanoapc must be installed on every machine, and the model must be a hub name or a path that all can read.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import ray

import nanoapc
from nanoapc.ray import LLMWorker, partition_by_prefix

EMBEDDED = Path(nanoapc.__file__).parent / "embedded"
SCENE = "The king has called his lords to York before the winter, and {name} speaks of {theme}. " * 4


def main(argv: list[str] | None = None) -> None:
    """Answers prompts that share long beginnings but come mixed, and says what each worker found in its cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(EMBEDDED), help="a directory or a Hugging Face hub name")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", type=float, default=0, help="of each worker")
    parser.add_argument("--rows", type=int, default=160)
    args = parser.parse_args(argv)
    themes = ("war", "love", "the crown", "the night", "winter", "ships", "a letter", "horses")
    rows = [{"id": i, "prompt": f"{SCENE.format(name='Derby', theme=themes[i % 8])}\n{i}:"} for i in range(args.rows)]
    # Ray's own data sources (read_json, read_parquet, ...) read what is larger than memory.
    dataset = partition_by_prefix(ray.data.from_items(rows), num_partitions=4 * args.workers)
    engine = {"model": args.model, "sampling_params": {"temperature": 0, "max_tokens": 16}}
    answered = dataset.map_batches(
        LLMWorker,
        fn_constructor_kwargs=engine,
        compute=ray.data.ActorPoolStrategy(size=args.workers),
        batch_size=None,
        num_gpus=args.gpus,
    )
    results = answered.take_all()  # or answered.write_json("answers/")
    total, cached = (sum(row[name] for row in results) for name in ("num_prompt_tokens", "num_cached_tokens"))
    print(f"{len(results)} answers; {cached} of {total} prompt tokens came from the workers' caches")
    print(min(results, key=lambda row: row["id"]))


if __name__ == "__main__":
    main()
