"""Loading: the tensors that config.json asks for, from safetensors alone, one copy of each in memory."""

from __future__ import annotations

import gc
import json
import pickle
import weakref
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from llm_helpers import memory_mib
from safetensors.torch import load_file, save_file
from tiny_models import edit_json, forward_logits, hf_logits, load_tiny, make_tiny_model, random_ids
from torch import Tensor

from nanoapc.kernels.reference import ReferenceKernels
from nanoapc.layers.linear import Linear
from nanoapc.models.checkpoint import TOKENIZER_PATTERNS, read_tensors, resolve_model
from nanoapc.models.decoder import CausalLM
from nanoapc.models.weights import WeightsDigest, check_weights, replace_weights

IDS = random_ids(20)
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def save(directory: Path, file: str = "model.safetensors", **config: Any) -> Tensor:
    """Saves a tiny model and returns transformers' logits of IDS."""
    model = make_tiny_model(directory, tokenizer=False, **config)
    (directory / "model.safetensors").rename(directory / file)
    return hf_logits(model, IDS)


def edit_tensors(directory: Path, remove: tuple[str, ...] = (), **changes: Tensor) -> None:
    """Rewrites model.safetensors with some tensors changed, added or removed."""
    path = directory / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name not in remove}
    save_file({**tensors, **changes}, path)


def shard(directory: Path) -> dict[str, str]:
    """Splits model.safetensors in two files and an index; returns its weight_map."""
    tensors = load_file(directory / "model.safetensors")
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: t for name, t in tensors.items() if weight_map[name] == file}, directory / file)
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def replace(model: CausalLM, tensors: Any, digest: WeightsDigest | None = None) -> None:
    replace_weights(model, check_weights(model, tensors), digest)


def assert_logits(directory: Path, expected: Tensor) -> None:
    torch.testing.assert_close(forward_logits(load_tiny(directory), IDS), expected, rtol=1e-4, atol=1e-4)


class TestFiles:
    def test_shards_saved_by_transformers_load(self, tmp_path: Path) -> None:
        expected = hf_logits(make_tiny_model(tmp_path, max_shard_size="100KB", tokenizer=False), IDS)
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
        assert_logits(tmp_path, expected)

    def test_only_the_pairs_of_the_index_are_read(self, tmp_path: Path) -> None:
        expected = save(tmp_path)
        noise = {name: torch.randn_like(t) for name, t in load_file(tmp_path / "model.safetensors").items()}
        weight_map = shard(tmp_path)
        save_file(noise, tmp_path / "consolidated.safetensors")
        save_file(noise, tmp_path / "model.safetensors")
        for file in set(weight_map.values()):  # each shard also stores, as noise, what the other one owns
            own = load_file(tmp_path / file)
            save_file({**noise, **own, "unlisted": torch.ones(1)}, tmp_path / file)
        assert_logits(tmp_path, expected)

    def test_without_an_index_model_safetensors_or_the_only_file_is_read(self, tmp_path: Path) -> None:
        expected = save(tmp_path, file="weights.safetensors")
        assert_logits(tmp_path, expected)
        (tmp_path / "weights.safetensors").rename(tmp_path / "model.safetensors")
        save_file({"noise": torch.ones(1)}, tmp_path / "other.safetensors")
        assert_logits(tmp_path, expected)

    def test_several_files_without_an_index_are_refused(self, tmp_path: Path) -> None:
        save(tmp_path, file="a.safetensors")
        save_file({"noise": torch.ones(1)}, tmp_path / "b.safetensors")
        with pytest.raises(ValueError, match=r"2 safetensors files and no model\.safetensors\.index\.json"):
            load_tiny(tmp_path)

    def test_an_index_of_missing_files_or_tensors_is_refused(self, tmp_path: Path) -> None:
        save(tmp_path)
        weight_map = shard(tmp_path)
        name = next(n for n, file in weight_map.items() if file == "part-1.safetensors")
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {**weight_map, name: "part-0.safetensors"}}))
        with pytest.raises(ValueError, match=rf"part-0\.safetensors.*{name}"):
            load_tiny(tmp_path)
        index.write_text(json.dumps({"weight_map": weight_map}))
        (tmp_path / "part-1.safetensors").unlink()
        with pytest.raises(ValueError, match=r"lists part-1\.safetensors, not found"):
            load_tiny(tmp_path)

    @pytest.mark.parametrize("content", [{}, {"weight_map": []}, {"weight_map": {"a": "../a.safetensors"}}])
    def test_an_index_must_map_to_files_beside_it(self, content: dict[str, Any], tmp_path: Path) -> None:
        save(tmp_path)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match="needs a weight_map"):
            load_tiny(tmp_path)

    def test_a_truncated_file_is_named(self, tmp_path: Path) -> None:
        save(tmp_path)
        path = tmp_path / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            load_tiny(tmp_path)

    @pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json", "model.safetensors"])
    def test_a_git_lfs_pointer_is_named_with_what_to_do(self, file: str, tmp_path: Path) -> None:
        save(tmp_path)
        (tmp_path / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 537\n")
        with pytest.raises(ValueError, match=rf"{file} is a Git LFS pointer.*fetch the file itself with `git"):
            load_tiny(tmp_path)

    def test_pickled_weights_are_never_opened(self, tmp_path: Path) -> None:
        expected = save(tmp_path, file="kept")
        marker = tmp_path / "marker"

        class Payload:
            def __reduce__(self) -> tuple[Any, ...]:
                return Path.touch, (marker,)

        (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))
        with pytest.raises(
            ValueError, match=r"no weights in safetensors: pytorch_model\.bin could run code.*; convert"
        ):
            load_tiny(tmp_path)
        (tmp_path / "kept").rename(tmp_path / "model.safetensors")
        assert_logits(tmp_path, expected)
        assert not marker.exists()

    def test_weights_in_another_format_are_to_be_converted(self, tmp_path: Path) -> None:
        save(tmp_path, file="kept")  # from the hub, other formats are not even fetched
        with pytest.raises(
            ValueError, match=r"safetensors, the only format that is read; convert pickled or GGUF files"
        ):
            load_tiny(tmp_path)


class TestTensors:
    def test_a_tied_head_is_the_embedding_with_or_without_a_stored_one(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        expected = save(tmp_path, tie_word_embeddings=True)
        edit_tensors(tmp_path, remove=(HEAD,))
        assert_logits(tmp_path, expected)
        embedding = load_file(tmp_path / "model.safetensors")[EMBEDDING]
        edit_tensors(tmp_path, **{HEAD: embedding.clone()})
        assert_logits(tmp_path, expected)
        assert not caplog.records
        edit_tensors(tmp_path, **{HEAD: embedding + 1})
        assert_logits(tmp_path, expected)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "lm_head.weight is ignored" in caplog.text

    def test_a_tied_checkpoint_may_store_the_head_instead_of_the_embedding(self, tmp_path: Path) -> None:
        expected = save(tmp_path, tie_word_embeddings=True)
        tensors = load_file(tmp_path / "model.safetensors")
        digests = [WeightsDigest() for _ in range(3)]
        load_tiny(tmp_path, digest=digests[0])
        edit_tensors(tmp_path, remove=(EMBEDDING,), **{HEAD: tensors[EMBEDDING].clone()})
        assert_logits(tmp_path, expected)
        model = load_tiny(tmp_path, load_format="dummy", digest=digests[1])
        replace(model, load_file(tmp_path / "model.safetensors").items(), digests[1])
        torch.testing.assert_close(forward_logits(model, IDS), expected, rtol=1e-4, atol=1e-4)
        load_tiny(tmp_path, digest=digests[2])
        assert len({str(digest) for digest in digests}) == 1  # the same weights
        edit_tensors(tmp_path, remove=(HEAD,))
        with pytest.raises(ValueError, match=f"missing: {EMBEDDING}"):
            load_tiny(tmp_path)

    def test_missing_tensors_are_named(self, tmp_path: Path) -> None:
        save(tmp_path)
        edit_tensors(tmp_path, remove=(HEAD, "model.layers.1.self_attn.k_proj.weight"))
        with pytest.raises(ValueError, match="missing: ") as error:
            load_tiny(tmp_path)
        assert HEAD in str(error.value)
        assert "model.layers.1.self_attn.k_proj.weight" in str(error.value)
        assert "model.layers.0" not in str(error.value)

    def test_qwen2_without_its_biases_is_refused(self, tmp_path: Path) -> None:
        make_tiny_model(tmp_path, "qwen2", tokenizer=False)
        edit_tensors(tmp_path, remove=("model.layers.0.self_attn.q_proj.bias",))
        with pytest.raises(ValueError, match=r"missing: model\.layers\.0\.self_attn\.q_proj\.bias"):
            load_tiny(tmp_path)

    def test_surplus_tensors_are_named(self, tmp_path: Path) -> None:
        save(tmp_path)
        edit_tensors(tmp_path, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
        with pytest.raises(ValueError, match=r"not part of a Qwen3.*model\.layers\.0\.self_attn\.q_proj\.bias"):
            load_tiny(tmp_path)

    def test_long_lists_of_tensors_are_cut(self, tmp_path: Path) -> None:
        save(tmp_path)
        edit_json(tmp_path / "config.json", num_hidden_layers=4)
        with pytest.raises(ValueError, match=r"missing: model\.layers\.2.* and 14 more"):
            load_tiny(tmp_path)

    def test_old_rotary_buffers_are_skipped(self, tmp_path: Path) -> None:
        expected = save(tmp_path)
        edit_tensors(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
        assert_logits(tmp_path, expected)

    @pytest.mark.parametrize("name", [EMBEDDING, HEAD, "model.layers.0.self_attn.v_proj.weight"])
    def test_a_wrong_shape_is_named_with_both_shapes(self, name: str, tmp_path: Path) -> None:
        save(tmp_path)
        found = load_file(tmp_path / "model.safetensors")[name]
        edit_tensors(tmp_path, **{name: torch.zeros(found.shape[0] + 1, 64)})
        message = rf"{name} has shape \[{found.shape[0] + 1}, 64\], expected \[{found.shape[0]}, 64\]"
        with pytest.raises(ValueError, match=message):
            load_tiny(tmp_path)

    def test_integer_weights_are_refused(self, tmp_path: Path) -> None:
        save(tmp_path)
        edit_tensors(tmp_path, **{HEAD: torch.zeros(320, 64, dtype=torch.int8)})
        with pytest.raises(ValueError, match=r"lm_head\.weight has dtype I8; quantised"):
            load_tiny(tmp_path)

    @pytest.mark.parametrize("stored", [torch.float64, torch.float16, torch.bfloat16])
    def test_any_float_dtype_is_converted(self, stored: torch.dtype, tmp_path: Path) -> None:
        save(tmp_path)
        before = load_file(tmp_path / "model.safetensors")
        edit_tensors(tmp_path, **{name: tensor.to(stored) for name, tensor in before.items()})
        converted = forward_logits(load_tiny(tmp_path), IDS)
        edit_tensors(tmp_path, **{name: tensor.to(stored).float() for name, tensor in before.items()})
        assert torch.equal(converted, forward_logits(load_tiny(tmp_path), IDS))


class CountingKernels(ReferenceKernels):
    """Packs by copying, as real packing does, and counts the originals that are still alive while packing."""

    def __init__(self) -> None:
        self.originals: list[weakref.ref[Any]] = []
        self.most_alive = 0

    def pack_linear(self, weight: Tensor, bias: Tensor | None, gated: bool = False) -> Any:
        self._count(weight)
        return super().pack_linear(weight.clone(), None if bias is None else bias.clone(), gated)

    def _count(self, weight: Tensor) -> None:
        self.originals.append(weakref.ref(weight.untyped_storage()))
        gc.collect()
        self.most_alive = max(self.most_alive, sum(ref() is not None for ref in self.originals))


class TestMemory:
    def test_declared_parameters_have_no_memory_until_loaded_nor_after_packing(self, tmp_path: Path) -> None:
        save(tmp_path)
        model = load_tiny(tmp_path)
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                assert parameter.is_meta == isinstance(module, Linear)

    def test_at_most_one_unpacked_weight_is_alive_while_loading(self, tmp_path: Path) -> None:
        expected = save(tmp_path)
        kernels = CountingKernels()
        model = load_tiny(tmp_path, kernels=kernels)
        assert len(kernels.originals) == 2 * 4 + 1
        assert kernels.most_alive == 1
        torch.testing.assert_close(forward_logits(model, IDS), expected, rtol=1e-4, atol=1e-4)


class TestDummy:
    def test_dummy_weights_need_no_files_and_are_the_same_each_time(self, tmp_path: Path) -> None:
        save(tmp_path, file="gone")
        (tmp_path / "gone").unlink()
        first, second = (forward_logits(load_tiny(tmp_path, load_format="dummy"), IDS) for _ in range(2))
        assert torch.equal(first, second)
        assert first.isfinite().all()
        assert first.std(dim=1).min() > 0

    def test_dummy_weights_have_the_requested_dtype(self, tmp_path: Path) -> None:
        save(tmp_path)
        model = load_tiny(tmp_path, load_format="dummy", dtype="bfloat16")
        assert model.model.embed_tokens.weight.dtype == torch.bfloat16
        assert model.model.embed_tokens.weight.float().std() == pytest.approx(0.02, rel=0.1)
        assert torch.equal(model.model.norm.weight, torch.ones(64, dtype=torch.bfloat16))

    def test_another_load_format_is_refused(self, tmp_path: Path) -> None:
        save(tmp_path)
        with pytest.raises(ValueError, match="load_format must be 'auto' or 'dummy', got 'gguf'"):
            load_tiny(tmp_path, load_format="gguf")


class TestReplaceWeights:
    @pytest.mark.parametrize("tied", [False, True])
    def test_the_model_becomes_the_other_one(
        self, tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        save(tmp_path, tie_word_embeddings=tied)
        model = load_tiny(tmp_path)
        other = make_tiny_model(tmp_path / "other", seed=1, tokenizer=False, tie_word_embeddings=tied)
        embedding = model.model.embed_tokens.weight
        replace(model, reversed(other.state_dict().items()))  # any order: a tied head comes first
        torch.testing.assert_close(forward_logits(model, IDS), hf_logits(other, IDS), rtol=1e-4, atol=1e-4)
        assert model.model.embed_tokens.weight is embedding  # in place
        assert not caplog.records

    def test_weights_keep_the_models_dtype(self, tmp_path: Path) -> None:
        hf_model = make_tiny_model(tmp_path, tokenizer=False)
        model = load_tiny(tmp_path, dtype="bfloat16")
        before = forward_logits(model, IDS)
        replace(model, hf_model.state_dict().items())
        assert torch.equal(forward_logits(model, IDS), before)

    @pytest.mark.parametrize("fault", ["missing", "surplus", "shape"])
    def test_a_wrong_set_changes_nothing(self, fault: str, tmp_path: Path) -> None:
        save(tmp_path)
        model = load_tiny(tmp_path)
        before = forward_logits(model, IDS)
        tensors = dict(make_tiny_model(tmp_path / "other", seed=1, tokenizer=False).state_dict())
        if fault == "missing":
            del tensors["model.norm.weight"]
        else:
            tensors["extra" if fault == "surplus" else "model.norm.weight"] = torch.ones(3)
        with pytest.raises(ValueError, match="extra" if fault == "surplus" else r"model\.norm\.weight"):
            replace(model, tensors.items())
        assert torch.equal(forward_logits(model, IDS), before)

    @pytest.mark.parametrize(
        "change",
        [
            lambda tensor: tensor.to(torch.int64),
            lambda tensor: tensor.to(torch.float8_e4m3fn),  # its scale would be lost
            lambda tensor: tensor.to("meta"),
            lambda tensor: tensor.to_sparse(),
            lambda tensor: tensor.numpy(),
            lambda tensor: None,
        ],
        ids=["int64", "float8", "meta", "sparse", "numpy", "None"],
    )
    def test_what_is_no_plain_tensor_of_floats_changes_nothing(self, change: Any, tmp_path: Path) -> None:
        save(tmp_path)
        model = load_tiny(tmp_path)
        before = forward_logits(model, IDS)
        tensors = dict(make_tiny_model(tmp_path / "other", seed=1, tokenizer=False).state_dict())
        tensors["model.norm.weight"] = change(tensors["model.norm.weight"])
        with pytest.raises(
            ValueError, match=r"model\.norm\.weight must be a dense tensor of floats .* with data, not "
        ):
            replace(model, tensors.items())
        assert torch.equal(forward_logits(model, IDS), before)

    @pytest.mark.parametrize(
        ("tensors", "message"),
        [
            (None, r"the weights are None; pass \(name, tensor\) pairs"),
            (["ab", "cd"], "entry 0 of the weights is 'ab'; pass"),
            ({EMBEDDING: 1}, f"entry 0 of the weights is '{EMBEDDING}'; pass .*items"),
            ([("a", torch.ones(1)), ("b",)], r"entry 1 of the weights is \('b',\); pass"),
            ([(torch.ones(1), "a")], "entry 0 of the weights is .*; pass"),
            ([("a", torch.ones(1)), ("a", torch.ones(1))], "the weights have 'a' twice"),
        ],
    )
    def test_what_is_no_list_of_pairs_of_different_names_is_refused(
        self, tensors: Any, message: str, tmp_path: Path
    ) -> None:
        save(tmp_path)
        with pytest.raises(ValueError, match=message):
            check_weights(load_tiny(tmp_path), tensors)


class TestResolveModel:
    def test_a_directory_is_taken_as_it_is(self, tmp_path: Path) -> None:
        assert resolve_model(str(tmp_path)) == tmp_path

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("model.gguf", "GGUF files are not supported"),
            ("config.json", "is a file; pass the model's directory"),
            ("absent/model", "there is no such directory"),
        ],
    )
    def test_other_paths_are_refused(self, name: str, message: str, tmp_path: Path) -> None:
        (tmp_path / "model.gguf").write_bytes(b"GGUF")
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(ValueError, match=message):
            resolve_model(tmp_path / name)

    def test_a_gguf_path_is_refused_even_where_no_file_is(self) -> None:
        with pytest.raises(ValueError, match="GGUF files are not supported"):
            resolve_model("someone/model.gguf")

    def test_a_hub_name_is_fetched(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = []
        files = ["model.safetensors", "additional_chat_templates/rag.jinja", "consolidated.safetensors"]
        files += ["original/params.json", "checkpoint-500/model.safetensors", "pytorch_model.bin", "code.py"]

        def snapshot_download(name: str, **options: Any) -> str:
            calls.append((name, list(filter_repo_objects(files, **options))))
            return str(tmp_path)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        assert resolve_model("Qwen/Qwen3-0.6B") == tmp_path
        assert calls.pop() == ("Qwen/Qwen3-0.6B", files[:2])
        assert resolve_model("Qwen/Qwen3-0.6B", TOKENIZER_PATTERNS) == tmp_path
        assert calls.pop() == ("Qwen/Qwen3-0.6B", files[1:2])

    @pytest.mark.parametrize("kind", [LocalEntryNotFoundError, RuntimeError])  # HTTP libraries have kinds of their own
    def test_without_a_network_a_hub_name_names_the_remedy(
        self, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def snapshot_download(name: str, **options: Any) -> str:
            raise kind("Got: ConnectError: Name or service not known\nmore")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        with pytest.raises(ValueError, match=r"'Qwen/Qwen3-0\.6B'.*ConnectError.* more\).*pass a local directory"):
            resolve_model("Qwen/Qwen3-0.6B")

    def test_a_gated_model_says_what_it_wants(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def snapshot_download(name: str, **options: Any) -> str:
            raise OSError("401 Client Error.\n\nCannot access gated repo.\nAccess is restricted. Please log in.")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        with pytest.raises(ValueError, match=r"Cannot access gated repo\. .*Please log in.*HF_TOKEN, or pass a local"):
            resolve_model("meta-llama/Llama-3.1-8B-Instruct")

    def test_without_the_hub_what_another_engine_has_cached_is_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def snapshot_download(name: str, **options: Any) -> str:
            error = LocalEntryNotFoundError("1 file(s) are missing (LICENSE.txt).")
            error.snapshot_path = str(tmp_path)  # type: ignore[attr-defined]  # as in IncompleteSnapshotError
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        with caplog.at_level("WARNING", "nanoapc"):
            assert resolve_model("Qwen/Qwen3-0.6B") == tmp_path
        assert "'Qwen/Qwen3-0.6B': 1 file(s) are missing (LICENSE.txt)" in caplog.text

    def test_an_impossible_hub_name_is_an_error_before_any_network(self) -> None:
        with pytest.raises(ValueError, match=r"'not a name'.*local directory"):
            resolve_model("not a name")


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs /proc to see what is mapped")
def test_what_has_been_read_of_a_file_is_not_kept_in_memory(tmp_path: Path) -> None:
    """16 tensors of 8 MiB each, added up one by one: never more than two of them are there."""
    path = tmp_path / "model.safetensors"
    save_file({f"w{i}": torch.full((2**21,), float(i)) for i in range(16)}, path)
    gc.collect()

    before = memory_mib("VmRSS")
    most = total = 0.0
    for _, tensor in read_tensors(dict.fromkeys([f"w{i}" for i in range(16)], path), [f"w{i}" for i in range(16)]):
        total += tensor.double().mean().item()
        most = max(most, memory_mib("VmRSS") - before)
        del tensor
    assert total == sum(range(16))
    assert most < 48  # a tensor, its doubles, and some room
