"""Block keys: what they depend on, what they do not, and that other tools' keys are the same."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoapc.engine import block_hash
from nanoapc.engine.block_hash import (
    BlockHasher,
    ExtraKey,
    decode_tokens,
    encode_extra_keys,
    encode_tokens,
)

ALGORITHMS = ("xxhash", "xxhash_cbor", "sha256", "sha256_cbor")
VLLM = json.loads((Path(__file__).parent / "data" / "vllm_block_keys.json").read_text())["vectors"]
DUMP_KEYS = """
import json, runpy, sys
hasher = (module := runpy.run_path(sys.argv[1]))["BlockHasher"](sys.argv[2])
encode = module["encode_tokens"]
print(json.dumps([k.hex() for k in [hasher.root, *hasher.keys(hasher.root, b"", [encode([1, 2]), encode([3, 4])])]]))
"""


def chain(hasher: BlockHasher, tokens: list[int], block_size: int, extra: bytes = b"") -> list[bytes]:
    blocks = [encode_tokens(tokens[i : i + block_size]) for i in range(0, len(tokens), block_size)]
    return hasher.keys(hasher.root, extra, blocks)


def keys_of_a_process(algorithm: str, hash_seed: str | None) -> list[str]:
    """Root and two keys as a fresh Python process makes them."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if hash_seed is not None:
        environment["PYTHONHASHSEED"] = hash_seed
    command = [sys.executable, "-c", DUMP_KEYS, block_hash.__file__, algorithm]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


# -- other tools' keys -------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", VLLM, ids=lambda v: f"{v['algo']}-{v['block_size']}")
def test_cbor_keys_equal_vllms(vector: dict) -> None:
    hasher = BlockHasher(vector["algo"], seed=vector["pythonhashseed"])
    assert hasher.root.hex() == vector["none_hash"]
    assert [key.hex() for key in chain(hasher, vector["tokens"], vector["block_size"])] == vector["chain"]


# -- what a key stands for ---------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_key_stands_for_the_whole_prefix(algorithm: str) -> None:
    hasher = BlockHasher(algorithm, seed="7")
    keys = chain(hasher, [1, 2, 3, 4, 5, 6, 7, 8], 4)
    assert len(set(keys)) == 2
    assert {len(key) for key in keys} == {16 if algorithm.startswith("xxhash") else 32}
    assert chain(hasher, [1, 2, 3, 4, 5, 6, 7, 9], 4)[0] == keys[0], "a key depends on later tokens"
    assert chain(hasher, [9, 2, 3, 4, 5, 6, 7, 8], 4)[1] != keys[1], "a key ignores what came before"
    assert chain(hasher, [5, 6, 7, 8, 5, 6, 7, 8], 4)[1] not in keys
    assert keys[1:] == hasher.keys(keys[0], b"", [encode_tokens([5, 6, 7, 8])]), "a chain cannot be extended"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_extra_keys_change_the_first_key_and_so_all_that_follow(algorithm: str) -> None:
    hasher = BlockHasher(algorithm, seed="7")
    plain = chain(hasher, [1, 2, 3, 4], 2)
    salted = chain(hasher, [1, 2, 3, 4], 2, encode_extra_keys([("salt", "a")]))
    other = chain(hasher, [1, 2, 3, 4], 2, encode_extra_keys([("salt", "b")]))
    assert len({*plain, *salted, *other}) == 6
    assert salted[1] == hasher.keys(salted[0], b"", [encode_tokens([3, 4])])[0], "extra keys are for the first block"


def test_algorithms_and_seeds_give_different_keys() -> None:
    keys = [chain(BlockHasher(name, seed), [1, 2], 2)[0] for name in ALGORITHMS for seed in ("0", "1")]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_ids_with_equal_python_hashes_have_different_keys(algorithm: str) -> None:
    assert hash(-1) == hash(-2)
    hasher = BlockHasher(algorithm, seed="0")
    assert len({chain(hasher, [token], 1)[0] for token in (-1, -2, 0, 1, 2**31 - 1)}) == 5
    assert chain(hasher, [True], 1) == chain(hasher, [1], 1), "True is token 1"


@pytest.mark.parametrize("algorithm", ["blake3", "", "xxhash_json", "SHA256", "sha256cbor"])
def test_an_unknown_algorithm_is_refused_with_the_known_ones(algorithm: str) -> None:
    with pytest.raises(ValueError, match="xxhash, xxhash_cbor, sha256 or sha256_cbor") as error:
        BlockHasher(algorithm)
    assert repr(algorithm) in str(error.value)


@pytest.mark.parametrize("algorithm", ["xxhash_cbor", "sha256_cbor"])
def test_a_missing_cbor2_is_a_clear_error(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_cbor2(name: str, *args: object, **kwargs: object) -> object:
        if name == "cbor2":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_cbor2)
    with pytest.raises(ValueError, match=r"needs the package cbor2: pip install 'nanoapc\[cbor\]'") as error:
        BlockHasher(algorithm)
    assert algorithm in str(error.value)
    BlockHasher(algorithm.removesuffix("_cbor"))  # needs no extra


# -- the root ----------------------------------------------------------------------------------------------


def test_keys_come_from_pythonhashseed_and_not_from_pythons_hash() -> None:
    for algorithm in ("xxhash", "sha256"):
        zero = keys_of_a_process(algorithm, "0")
        assert zero == keys_of_a_process(algorithm, "0"), "a seed makes keys repeatable"
        assert zero[0] != keys_of_a_process(algorithm, "1")[0], "the seed makes the root"
    first = BlockHasher("xxhash", seed="0")
    assert keys_of_a_process("xxhash", "0")[1:] == [key.hex() for key in chain(first, [1, 2, 3, 4], 2)]


@pytest.mark.parametrize("hash_seed", [None, "random"])
def test_without_a_seed_xxhash_keys_are_random_per_process_and_sha256_keys_fixed(hash_seed: str | None) -> None:
    one, two = keys_of_a_process("xxhash", hash_seed), keys_of_a_process("xxhash", hash_seed)
    assert not set(one) & set(two)
    assert keys_of_a_process("sha256", hash_seed) == keys_of_a_process("sha256", hash_seed)


def test_random_keys_are_said_in_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with caplog.at_level("INFO"):
        random_root = BlockHasher("xxhash").root
        assert "set PYTHONHASHSEED" in caplog.text
        assert random_root != BlockHasher("xxhash").root
        caplog.clear()
        monkeypatch.setenv("PYTHONHASHSEED", "12")
        assert BlockHasher("xxhash").root == BlockHasher("xxhash", seed="12").root
        assert BlockHasher("sha256").root == BlockHasher("sha256", seed="12").root
    assert not caplog.text


# -- encodings ---------------------------------------------------------------------------------------------

token_lists = st.lists(st.integers(0, 2**31 - 1), max_size=12)
extra_values = st.one_of(st.text(max_size=6), st.integers(), st.binary(max_size=6))
extra_key_lists = st.lists(st.lists(extra_values, max_size=3).map(tuple), max_size=3)


@given(token_lists, token_lists)
@settings(deadline=None)
def test_encoded_tokens_come_back_and_sort_as_token_lists(a: list[int], b: list[int]) -> None:
    assert decode_tokens(encode_tokens(a)) == a
    assert encode_tokens(np.asarray(a, np.int32)) == encode_tokens(a)
    assert len(encode_tokens(a)) == 4 * len(a)
    assert (encode_tokens(a) < encode_tokens(b)) == (a < b)


@given(extra_key_lists, extra_key_lists)
@settings(deadline=None)
def test_different_extra_keys_never_encode_alike(a: list[ExtraKey], b: list[ExtraKey]) -> None:
    assert (encode_extra_keys(a) == encode_extra_keys(b)) == (a == b)


def test_extra_keys_are_typed_and_length_framed() -> None:
    pairs: list[list[ExtraKey]] = [
        [],
        [("salt", "x")],
        [("lora", "x")],
        [("salt", b"x")],
        [("salt", "1")],
        [("salt", 1)],
        [("salt", "a"), ("salt", "b")],
        [("salt", "ab")],
        [("salt", "a", "b")],
        [("org_1", "2345")],
        [("org_12345", "")],
        [("salt", "sab")],  # equal but for the lengths: s salt s sab, s salts s ab
        [("salts", "ab")],
        [("salt", "\ud800")],  # what JSON can hold and UTF-8 cannot
        [("image", b"hash", 0)],
        [("image", b"hash", 16)],
    ]
    for a, b in combinations(pairs, 2):
        assert encode_extra_keys(a) != encode_extra_keys(b), (a, b)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_salt_and_first_token_can_pose_as_another_pair(algorithm: str) -> None:
    hasher = BlockHasher(algorithm, seed="0")
    salts = [None, "a", "ab", "abc", "a\x00", "\x00a", "x", 1, "1"]
    first_tokens = [0, ord("a"), ord("b"), int.from_bytes(b"abc\x00", "big"), 1, 256, 2**24]
    keys = set()
    for salt in salts:
        extra = b"" if salt is None else encode_extra_keys([("salt", salt)])
        for token in first_tokens:
            keys.add((salt is None, chain(hasher, [token, 1], 2, extra)[0]))
    assert len({key for _, key in keys}) == len(salts) * len(first_tokens)
