"""Generation: one program reads, one makes tokens, the cache stays where it is, and the text is eager's."""

from __future__ import annotations

import pytest
import torch
import transformers

import tpu_compile
from tpu_compile.device.storage import cell_of
from tpu_compile.generation import Decoder, Sampling, custom_generate

ROOM = 256


def llama(layers: int = 1, kind: str = "Llama", **more) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=100,
        eos_token_id=None,
        pad_token_id=0,
        **more,
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def prompts(length: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = torch.randint(5, 100, (2, length)), torch.ones(2, length, dtype=torch.int64)
    mask[0, :3] = 0
    return ids, mask


def test_two_programs_a_cache_that_stays_and_the_tokens_of_eager():
    model, (ids, mask) = llama(2), prompts()
    want = model.generate(ids, attention_mask=mask, max_new_tokens=200, do_sample=False)
    decoder = Decoder(model.to("tpu"), max_length=ROOM, buckets=(8, 16))
    decoder(ids, mask, max_new_tokens=2)
    cache = decoder._states[2].cache
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    places = [cell_of(t).buffer.unsafe_buffer_pointer() for t in tensors]
    tpu_compile.reset_stats()
    got = decoder(ids, mask, max_new_tokens=200)
    stats = tpu_compile.stats()
    assert torch.equal(got, want)
    assert stats["graphs"] == stats["lowerings"] == stats["xla_compiles"] == stats["copied_arguments"] == 0
    assert 200 <= stats["executions"] < 220 and stats["h2d_bytes"] < 2000
    assert places == [cell_of(t).buffer.unsafe_buffer_pointer() for t in tensors]
    tpu_compile.reset_stats()
    decoder(*prompts(6), max_new_tokens=3)
    assert tpu_compile.stats()["graphs"] == 0  # the same bucket
    assert decoder(*prompts(12), max_new_tokens=3).shape == (2, 15) and tpu_compile.stats()["graphs"] == 1


def test_pieces_of_a_prompt_and_a_window_that_slides():
    model, (ids, mask) = llama(2, "Mistral", sliding_window=8), prompts(11)
    want = model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
    decoder = Decoder(model, max_length=ROOM, chunk=4)
    assert torch.equal(decoder(ids, mask, max_new_tokens=30), want)
    assert tpu_compile.stats()["graphs"] == 2
    assert torch.equal(decoder(ids[:, :9], mask[:, :9], max_new_tokens=2)[:, :9], ids[:, :9])
    assert tpu_compile.stats()["graphs"] == 2


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
GQA = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2}
MOE = {**GQA, "head_dim": 16, "num_experts_per_tok": 2}
ARCHITECTURES = {
    "Falcon": SIZES,  # one key and value for all heads
    "DeepseekV3": {  # keys and values of other widths, which its configuration does not call so
        **(SIZES | {"intermediate_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}),
        **{"moe_intermediate_size": 32, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8},
        **{"qk_nope_head_dim": 8, "topk_group": 1, "first_k_dense_replace": 1},
    },
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 64},
    "Qwen2": GQA,
    "Qwen3": {**GQA, "head_dim": 16},
    "Qwen3Moe": {**MOE, "num_experts": 4, "moe_intermediate_size": 32},
    "Gemma": {**GQA, "head_dim": 16},
    "Gemma2": {**GQA, "head_dim": 16, "sliding_window": 8},
    "Phi": {**SIZES, "intermediate_size": 64},
    "Phi3": GQA,
    "Mixtral": {**MOE, "num_local_experts": 4},
    "GptOss": {**MOE, "num_local_experts": 4, "sliding_window": 8},
    "GPTNeoX": {**SIZES, "intermediate_size": 64},
    "OPT": {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "Bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100},
    "GPTJ": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100, "rotary_dim": 8, "n_positions": 64},
    "Cohere": GQA,
}


def small(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        **ARCHITECTURES[kind], eos_token_id=None, pad_token_id=0, bos_token_id=1
    )
    name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    return getattr(transformers, name)(config).eval()


FAST = {"Falcon", "DeepseekV3"}


@pytest.mark.parametrize(
    "kind", [k if k in FAST else pytest.param(k, marks=pytest.mark.full) for k in ARCHITECTURES], ids=str
)
def test_other_architectures_write_what_eager_writes(kind):
    model, (ids, mask) = small(kind), prompts()
    want = model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False)
    decoder = Decoder(model.to("tpu"), max_length=32, buckets=(8,))
    assert torch.equal(decoder(ids, mask, max_new_tokens=16), want)
    tpu_compile.reset_stats()
    assert torch.equal(decoder(ids, mask, max_new_tokens=16), want)
    assert tpu_compile.stats()["graphs"] == tpu_compile.stats()["fallback_ops"] == 0


def test_a_model_with_another_kind_of_state_is_told():
    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=100)
    with pytest.raises(tpu_compile.BadCall, match="keeps a LinearAttentionLayer"):
        Decoder(transformers.MambaForCausalLM(config).eval(), max_length=16)(prompts()[0], max_new_tokens=2)


def test_a_model_that_counts_with_numbers_is_told():
    config = transformers.MptConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=100, max_seq_len=16)
    with pytest.raises(tpu_compile.BadCall, match=r"MptForCausalLM_read cannot be one program.*own generate") as caught:
        Decoder(transformers.MptForCausalLM(config).eval(), max_length=16)(prompts()[0], max_new_tokens=2)
    assert "modeling_mpt.py" in str(caught.value)


def test_drawn_tokens_follow_the_seed_and_sequences_end():
    model, (ids, mask) = llama(), prompts()
    decoder = Decoder(model, max_length=ROOM)
    greedy = decoder(ids, mask, max_new_tokens=20)

    def drawn(seed: int, temperature: float) -> torch.Tensor:
        torch.manual_seed(seed)
        return decoder(ids, mask, max_new_tokens=20, temperature=temperature, top_k=50, top_p=0.95)

    assert torch.equal(drawn(1, 2.0), drawn(1, 2.0)) and not torch.equal(drawn(1, 2.0), drawn(2, 2.0))
    before = tpu_compile.stats()["xla_compiles"]
    assert torch.equal(drawn(3, 1e-4), greedy) and tpu_compile.stats()["xla_compiles"] == before
    ends = greedy[:, 7 + 4].tolist()
    stopped = decoder(ids, mask, max_new_tokens=20, eos_token_id=ends, pad_token_id=0)
    for row, whole in zip(stopped[:, 7:].tolist(), greedy[:, 7:].tolist(), strict=True):
        cut = next(i for i, token in enumerate(whole) if token in ends)
        assert row == (whole[: cut + 1] + [0] * 20)[: len(row)]
    assert stopped.shape[1] <= 7 + 5


@pytest.mark.parametrize("sampling", [Sampling(True), Sampling(True, 3), Sampling(True, 0, True)], ids=str)
def test_tokens_are_drawn_with_their_chances(sampling):
    torch.manual_seed(0)
    logits = torch.tensor([3.0, 1.0, 2.0, 0.0, -1.0])
    chances = (logits / 2).softmax(0)
    if sampling.top_k:
        chances[3:] = 0
    if sampling.top_p:  # 0.46, 0.28, 0.17: the third fills 0.8
        chances[3:] = 0
    expected = chances / chances.sum()
    drawn = sampling.choose(logits.expand(20000, 5), torch.tensor(2.0), torch.tensor(0.8))
    share = torch.bincount(drawn, minlength=5) / 20000
    assert (share[expected == 0] == 0).all() and (share - expected).abs().max() < 0.02


def test_what_does_not_fit_is_said():
    decoder, (ids, mask) = Decoder(llama(), max_length=16), prompts()
    with pytest.raises(tpu_compile.BadCall, match="do not fit max_length=16"):
        decoder(ids, mask, max_new_tokens=20)
    with pytest.raises(tpu_compile.BadCall, match="pad on the left"):
        decoder(ids, mask.flip(1), max_new_tokens=2)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.full), "tpu"])
def test_generate_of_transformers_with_a_static_cache(device):
    model, (ids, mask) = llama(), prompts()
    want = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    model = model.to(device)
    model.forward = torch.compile(model.forward, backend="tpu", fullgraph=True)

    def generate() -> torch.Tensor:
        return model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=12,
            do_sample=False,
            cache_implementation="static",
        )

    assert torch.equal(generate().cpu(), want) and tpu_compile.stats()["graphs"] == 2
    tpu_compile.reset_stats()
    assert torch.equal(generate().cpu(), want)
    stats = tpu_compile.stats()
    assert stats["graphs"] == stats["lowerings"] == stats["copied_arguments"] == 0 and stats["h2d_bytes"] < 1000


@pytest.mark.full
@pytest.mark.parametrize("kind", ["T5", "Bart"])
def test_an_encoder_and_a_decoder(kind):
    torch.manual_seed(0)
    sizes = {
        "T5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
        "Bart": {
            **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
            **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "forced_eos_token_id": None},
        },
    }[kind]
    config = getattr(transformers, f"{kind}Config")(
        **sizes, vocab_size=100, eos_token_id=None, pad_token_id=0, bos_token_id=1, decoder_start_token_id=2
    )
    model, (ids, mask) = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval(), prompts()
    want = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    model.forward = torch.compile(model.forward, backend="tpu", fullgraph=True)
    given = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "cache_implementation": "static"}
    assert torch.equal(model.generate(ids, **given), want) and tpu_compile.stats()["graphs"] == 2
    assert torch.equal(model.generate(ids, **given), want) and tpu_compile.stats()["graphs"] == 2


def test_generate_of_transformers_compiles_for_the_device_by_itself():
    """A window that slides is a number that changes: transformers asks for static sizes, unless it is told."""
    model, (ids, mask) = llama(1, "Mistral", sliding_window=8), prompts()
    want = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    model = model.to("tpu")
    given = {
        **{"attention_mask": mask.to("tpu"), "max_new_tokens": 12, "do_sample": False},
        **{"cache_implementation": "static", "compile_config": transformers.CompileConfig(backend="tpu", mode=None)},
    }
    assert torch.equal(model.generate(ids.to("tpu"), **given).cpu(), want)
    assert tpu_compile.stats()["graphs"] == 2  # before the window is full, and then


def test_generate_of_transformers_with_our_loop():
    model, (ids, mask) = llama(), prompts()
    want = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    model = model.to("tpu")

    def generate(**more) -> torch.Tensor:
        given = {"attention_mask": mask.to("tpu"), "custom_generate": custom_generate, **more}
        return model.generate(ids.to("tpu"), max_new_tokens=20, **given)

    assert torch.equal(generate(do_sample=False).cpu(), want)
    tpu_compile.reset_stats()
    assert torch.equal(generate(do_sample=False).cpu(), want) and tpu_compile.stats()["xla_compiles"] == 0
    with pytest.raises(tpu_compile.ConfigError, match="RepetitionPenalty"):
        generate(repetition_penalty=1.5)
