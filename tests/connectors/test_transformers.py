"""KV caches of transformers models: bit-equal after a restore, never another's, and a miss when damaged."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from stored_bytes import flip_byte
from tiny_models import VOCABULARY_COUNT, WINDOW_TOKENS, build, prompt
from transformers import DynamicCache, EncoderDecoderCache, MambaConfig, MambaForCausalLM, StaticCache
from transformers.cache_utils import Cache, DynamicIndexedLayer, Fp8QuantizedLayer

import blockkv
from blockkv.connectors.transformers import load_prefix, model_family, save_cache, weights_fingerprint
from blockkv.errors import InvalidArgument, StoreClosed, StoreReadOnly
from blockkv.testing import SimulatedDevice

WORKER = Path(__file__).parent / "workers" / "transformers_process.py"
ROOT = Path(__file__).parents[2]
CHUNK_TOKENS = 16
MAX_TOKENS = 512
NAMES = ("llama", "gemma", "lfm", "qwen")
KINDS = ("dynamic", "static")

_built: dict[str, Any] = {}


def model_of(name: str) -> Any:
    if name not in _built:
        _built[name] = build(name)
    return _built[name]


def empty_cache(model: Any, kind: str) -> Any:
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=MAX_TOKENS)


def computed(model: Any, tokens: torch.Tensor, kind: str = "dynamic") -> Any:
    cache = empty_cache(model, kind)
    with torch.inference_mode():
        model(input_ids=tokens, cache=cache, use_cache=True)
    return cache


def go_on(model: Any, cache: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=tokens, cache=cache, use_cache=True).logits


def save(store: blockkv.Store, cache: Any, tokens: Any, family: blockkv.Family, **options: Any) -> int:
    return save_cache(store, cache, tokens, family, chunk_tokens=CHUNK_TOKENS, **options)


def load(store: blockkv.Store, tokens: Any, family: blockkv.Family, **options: Any) -> tuple[Any, int]:
    return load_prefix(store, tokens, family, chunk_tokens=CHUNK_TOKENS, **options)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These models are too small for several, which only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def image(image_dir: Path) -> Path:
    path = image_dir / "kv.img"
    blockkv.format(path, size="64MiB", average_chunk="64KiB")
    return path


@pytest.fixture
def store(image: Path) -> Iterator[blockkv.Store]:
    with blockkv.open(image) as store:
        yield store


# -- what comes back ---------------------------------------------------------------------------------------


def test_another_process_goes_on_from_the_bits_of_the_first(image: Path) -> None:
    def run(role: str) -> Any:
        done = subprocess.run(
            [sys.executable, WORKER, role, image],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    saved, loaded = run("save"), run("load")
    assert loaded == saved
    assert [found["count"] for found in loaded.values()] == [576, 576, *[600] * 6]
    assert any(len(set(found["tokens"])) > 1 for found in loaded.values())


@pytest.mark.parametrize(("source", "target"), list(itertools.product(KINDS, KINDS)))
@pytest.mark.parametrize("name", NAMES)
def test_one_kind_of_cache_fills_the_other(store: blockkv.Store, name: str, source: str, target: str) -> None:
    """At lengths on both sides of what matters: a chunk's end, a window's."""
    model = model_of(name)
    for count in (1, CHUNK_TOKENS, WINDOW_TOKENS - 1, WINDOW_TOKENS, WINDOW_TOKENS + 1, 150, 160):
        tokens = prompt(200, seed=count)
        family = model_family(model)
        saved = computed(model, tokens[:, :count], source)
        expected = count - count % CHUNK_TOKENS if name == "llama" else count
        assert save(store, saved, tokens, family) == expected
        found, held = load(store, tokens, family, cache=empty_cache(model, target))
        assert held == expected
        for mine, theirs in zip(found.layers, saved.layers, strict=True):
            length = min(held, WINDOW_TOKENS - 1) if "Sliding" in type(theirs).__name__ else held
            for part in ("keys", "values"):
                if held and getattr(theirs, part, None) is not None:
                    assert torch.equal(last(mine, part, held, length), last(theirs, part, count, length))
        # and the model takes it for what it is
        again = computed(model, tokens[:, :held], target) if held else empty_cache(model, target)
        mine, theirs = go_on(model, found, tokens[:, held:]), go_on(model, again, tokens[:, held:])
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
        if source == target and held == count:
            assert torch.equal(mine, theirs)


def last(layer: Any, part: str, count: int, length: int) -> torch.Tensor:
    """`length` rows of a layer that has seen `count` tokens: a window's last ones, else the first."""
    rows = getattr(layer, part)
    end = min(count, rows.shape[2]) if "Sliding" in type(layer).__name__ else length
    return rows[:, :, end - length : end]


@pytest.mark.parametrize("kind", KINDS)
def test_generate_goes_on_and_the_conversation_grows(store: blockkv.Store, kind: str) -> None:
    model = model_of("llama")
    family = model_family(model)
    turn = prompt(100)
    held_before = 0
    for _ in range(3):
        cache, held = load(store, turn, family, cache=empty_cache(model, kind))
        assert held == held_before
        with torch.inference_mode():
            output = model.generate(
                input_ids=turn,
                cache=cache,
                max_new_tokens=20,
                do_sample=False,
                return_dict_in_generate=True,
            )
        stored = save(store, output.cache, output.sequences, family)
        assert stored == (output.sequences.shape[1] - 1) // CHUNK_TOKENS * CHUNK_TOKENS
        turn = torch.cat([output.sequences, prompt(30, seed=held_before)], 1)
        held_before = stored


def test_a_static_cache_can_be_used_again(store: blockkv.Store) -> None:
    model, tokens = model_of("gemma"), prompt(200)
    family = model_family(model)
    save(store, computed(model, tokens[:, :150], "static"), tokens, family)
    reused = empty_cache(model, "static")
    addresses = set()
    for _ in range(2):
        _, held = load(store, tokens, family, cache=reused)
        addresses.add(reused.layers[-1].keys.data_ptr())
        fresh = computed(model, tokens[:, :held], "static")
        assert torch.equal(go_on(model, reused, tokens[:, held:]), go_on(model, fresh, tokens[:, held:]))
        reused.reset()
    assert len(addresses) == 1, "compiled graphs rely on where it is"


def test_memory_made_in_inference_mode_is_filled_outside_of_it(image: Path, store: blockkv.Store) -> None:
    model, tokens = model_of("gemma"), prompt(200)
    family = model_family(model)
    save(store, computed(model, tokens[:, :40], "static"), tokens, family)
    save(store, computed(model, tokens[:, :150], "static"), tokens, family)
    reused = computed(model, tokens[:, :10], "static")
    assert reused.layers[0].keys.is_inference()
    with torch.inference_mode():
        reused.reset()
    assert load(store, tokens, family, cache=reused)[1] == 150
    with torch.inference_mode():
        reused.reset()
    flip_byte(image, store, blockkv.prefix_keys(tokens[0].tolist(), CHUNK_TOKENS, family)[5])
    assert load(store, tokens, family, cache=reused)[1] == 40
    fresh = computed(model, tokens[:, :40], "static")
    assert torch.equal(go_on(model, reused, tokens[:, 40:]), go_on(model, fresh, tokens[:, 40:]))


def test_the_device_writes_into_the_layers(store: blockkv.Store) -> None:
    """Rows of 64 tokens are 16 KiB here: pieces that need no copy on the way in."""
    model, tokens = model_of("llama"), prompt(300)
    family = model_family(model)
    save_cache(store, computed(model, tokens), tokens, family, chunk_tokens=64)
    before = store.stats()
    cache, held = load_prefix(store, tokens, family, config=model.config, chunk_tokens=64)
    after = store.stats()
    assert held == 256
    assert after["get_bytes"] - before["get_bytes"] == 256 * 3 * 2 * 2 * 64 * 4
    assert after["get_copied_bytes"] == before["get_copied_bytes"]
    assert cache.layers[0].keys.data_ptr() % 4096 == 0


def test_something_is_left_for_the_model(store: blockkv.Store) -> None:
    model, tokens = model_of("llama"), prompt(4 * CHUNK_TOKENS)
    family = model_family(model)
    assert save(store, computed(model, tokens), tokens, family) == 4 * CHUNK_TOKENS
    assert load(store, tokens, family, config=model.config)[1] == 3 * CHUNK_TOKENS
    longer = torch.cat([tokens, prompt(1)], 1)
    assert load(store, longer, family, config=model.config)[1] == 4 * CHUNK_TOKENS
    short = StaticCache(config=model.config, max_cache_len=2 * CHUNK_TOKENS + 3)
    assert load(store, longer, family, cache=short)[1] == 2 * CHUNK_TOKENS
    assert load(store, tokens[:, :1], family, config=model.config)[1] == 0
    assert load(store, [], family, config=model.config)[1] == 0


def test_tokens_are_lists_arrays_and_tensors(store: blockkv.Store) -> None:
    model, tokens = model_of("llama"), prompt(100)
    family = model_family(model)
    save(store, computed(model, tokens), tokens[0].tolist(), family)
    for form in (tokens, tokens[0], tokens[0].numpy(), tokens[0].tolist(), tuple(tokens[0].tolist())):
        assert load(store, form, family, config=model.config)[1] == 96


def test_a_window_can_be_gone_on_from_wherever_it_was_saved(store: blockkv.Store) -> None:
    model, tokens = model_of("gemma"), prompt(200)
    family = model_family(model)
    cache = empty_cache(model, "dynamic")
    for first, end in ((0, 40), (40, 96), (96, 150)):
        go_on(model, cache, tokens[:, first:end])
        assert save(store, cache, tokens, family) == end
    for asked, expected in ((200, 150), (150, 96), (97, 96), (96, 40), (40, 0)):
        found, held = load(store, tokens[:, :asked], family, config=model.config)
        assert held == expected
        fresh = computed(model, tokens[:, :held]) if held else empty_cache(model, "dynamic")
        rest = tokens[:, held:asked]
        torch.testing.assert_close(go_on(model, found, rest), go_on(model, fresh, rest), rtol=1e-3, atol=1e-3)
    other = tokens.clone()
    other[0, 120] = (other[0, 120] + 1) % VOCABULARY_COUNT  # in the tail of the last snapshot
    assert load(store, other, family, config=model.config)[1] == 96


def test_each_layer_may_have_its_device(store: blockkv.Store) -> None:
    model, tokens = model_of("gemma"), prompt(200)
    family = model_family(model)
    save(store, computed(model, tokens[:, :150]), tokens, family)
    devices = [torch.device("cpu"), "cpu", "meta"]
    found, held = load(store, tokens, family, config=model.config, device=devices)
    assert held == 150
    assert [layer.keys.device.type for layer in found.layers] == ["cpu", "cpu", "meta"]
    assert found.layers[2].keys.shape == (1, 2, 150, 32)


def test_an_array_serves_as_well(image_dir: Path) -> None:
    members = [image_dir / f"{name}.img" for name in "ab"]
    blockkv.format(members, size="64MiB", average_chunk="64KiB")
    model, tokens = model_of("gemma"), prompt(200)
    family = model_family(model)
    with blockkv.open(members) as store:
        assert save(store, computed(model, tokens[:, :150]), tokens, family) == 150
        found, held = load(store, tokens, family, config=model.config)
    fresh = computed(model, tokens[:, :150])
    assert held == 150
    assert torch.equal(go_on(model, found, tokens[:, 150:]), go_on(model, fresh, tokens[:, 150:]))


def test_a_store_that_another_process_owns_serves_as_well(image: Path, tmp_path: Path) -> None:
    model, tokens = model_of("gemma"), prompt(200)
    family = model_family(model)
    socket = tmp_path / "owner.sock"
    command = [sys.executable, "-m", "blockkv", "serve", image, "--socket", socket, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "{\n"
            with blockkv.open(socket) as first, blockkv.open(socket) as second:
                assert save(first, computed(model, tokens[:, :150]), tokens, family, durable=True) == 150
                found, held = load(second, tokens, family, config=model.config)
        finally:
            owner.kill()
    assert held == 150
    fresh = computed(model, tokens[:, :150])
    assert torch.equal(go_on(model, found, tokens[:, 150:]), go_on(model, fresh, tokens[:, 150:]))


# -- never another's ---------------------------------------------------------------------------------------


def test_families_share_nothing(store: blockkv.Store) -> None:
    tokens = prompt(100)
    model = model_of("llama")
    family = model_family(model)
    save(store, computed(model, tokens), tokens, family)
    others = {
        "weights": model_family(build("llama", seed=4)),
        "configuration": model_family(build("llama", rope_theta=500.0)),
        "dtype": model_family(build("llama").half()),
        "attention": model_family(build("llama", attn_implementation="eager")),
        "rank": model_family(model, tensor_rank=1, tensor_ranks=2),
        "salt": model_family(model, salt="a tenant"),
        "layout": replace(family, layout="another"),
    }
    for what, other in others.items():
        assert load(store, tokens, other, config=model.config)[1] == 0, what
    assert load_prefix(store, tokens, family, config=model.config, chunk_tokens=32)[1] == 0
    assert load(store, tokens, model_family(build("llama")), config=model.config)[1] == 96


def test_a_chunk_of_another_shape_is_a_miss(store: blockkv.Store, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever names two models the same gets nothing rather than nonsense."""
    tokens = prompt(100)
    small, wide = build("llama", num_hidden_layers=2), model_of("llama")
    family = model_family(wide)
    save(store, computed(wide, tokens), tokens, family)
    with caplog.at_level(logging.WARNING, "blockkv"):
        assert load(store, tokens, family, config=small.config)[1] == 0
    assert "not for this cache" in caplog.text


def test_the_fingerprint_tells_every_bit(tmp_path: Path) -> None:
    model = build("llama")
    known = weights_fingerprint(model)
    model.save_pretrained(tmp_path)
    assert weights_fingerprint(type(model).from_pretrained(tmp_path)) == known
    for name, tensor in model.state_dict().items():
        raw = tensor.view(torch.uint8).view(-1)
        raw[-1] ^= 1
        assert weights_fingerprint(model) != known, name
        raw[-1] ^= 1
    with torch.no_grad():
        first, second = (model.model.layers[n].mlp.up_proj.weight for n in (0, 1))
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)
    assert weights_fingerprint(model) != known, "the same tensors under each other's names"
    assert weights_fingerprint(build("llama").to(torch.bfloat16)) != known
    tied = build("llama", tie_word_embeddings=True)
    assert weights_fingerprint(tied) != weights_fingerprint(build("llama", tie_word_embeddings=False))


def test_weights_whose_bytes_are_elsewhere_are_named(store: blockkv.Store) -> None:
    model = build("llama")
    with torch.device("meta"):
        nowhere = type(model)(model.config)
    with pytest.raises(InvalidArgument, match=r"meta device.*weights="):
        model_family(nowhere)
    assert model_family(nowhere, weights="commit 1").weights == "commit 1"
    model.peft_config = {"default": object()}
    with pytest.raises(InvalidArgument, match="adapters"):
        weights_fingerprint(model)


# -- damage and devices that fail --------------------------------------------------------------------------


def test_a_flipped_byte_ends_the_prefix(image: Path, store: blockkv.Store) -> None:
    model, tokens = model_of("llama"), prompt(100)
    family = model_family(model)
    cold = computed(model, tokens[:, :48])
    expected = go_on(model, cold, tokens[:, 48:])
    assert save(store, computed(model, tokens[:, :48]), tokens, family) == 48
    assert save(store, computed(model, tokens), tokens, family) == 96
    keys = blockkv.prefix_keys(tokens[0].tolist(), CHUNK_TOKENS, family)
    for kind in KINDS:
        flip_byte(image, store, keys[3], 777)
        before = store.stats()["get_checksum_mismatch"]
        cache, held = load(store, tokens, family, cache=empty_cache(model, kind))
        assert held == 48
        assert store.stats()["get_checksum_mismatch"] == before + 1
        logits = go_on(model, cache, tokens[:, 48:])
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
        if kind == "dynamic":
            assert torch.equal(logits, expected)
        assert save(store, cache, tokens, family) == 96, "what was damaged is put anew"
        assert load(store, tokens, family, config=model.config)[1] == 96


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_snapshot_falls_back_on_the_one_before(
    image: Path, store: blockkv.Store, kind: str
) -> None:
    model, tokens = model_of("gemma"), prompt(200)
    family = model_family(model)
    cache = empty_cache(model, kind)
    for first, end in ((0, 40), (40, 150)):
        go_on(model, cache, tokens[:, first:end])
        known = set(store.keys())
        save(store, cache, tokens, family)
    snapshot = next(key for key in set(store.keys()) - known if "/s" in str(key))
    flip_byte(image, store, snapshot)
    found, held = load(store, tokens, family, cache=empty_cache(model, kind))
    assert held == 40
    fresh = computed(model, tokens[:, :40], kind)
    assert torch.equal(go_on(model, found, tokens[:, 40:]), go_on(model, fresh, tokens[:, 40:]))
    # a damaged chunk takes the snapshots after it along
    save(store, found, tokens, family)
    assert load(store, torch.cat([tokens, prompt(1)], 1), family, config=model.config)[1] == 200
    flip_byte(image, store, blockkv.prefix_keys(tokens[0].tolist(), CHUNK_TOKENS, family)[5])
    assert load(store, torch.cat([tokens, prompt(1)], 1), family, config=model.config)[1] == 40


def test_a_device_that_fails_is_a_miss_and_no_exception(caplog: pytest.LogCaptureFixture) -> None:
    model, tokens = model_of("llama"), prompt(100)
    family = model_family(model)
    device = SimulatedDevice(32 << 20)
    blockkv.format(device, average_chunk="64KiB")
    with contextlib.suppress(StoreReadOnly), blockkv.open(device) as store:  # closing finds out as well
        assert save(store, computed(model, tokens), tokens, family) == 96
        device.stop()
        cache, held = load(store, tokens, family, config=model.config)
        assert held == 0
        assert torch.equal(go_on(model, cache, tokens), go_on(model, empty_cache(model, "dynamic"), tokens))
        other = prompt(100, seed=9)
        with caplog.at_level(logging.WARNING, "blockkv"):
            assert save(store, computed(model, other), other, family) == 0
        assert "not stored" in caplog.text


def test_what_does_not_fit_is_not_stored(image_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, tokens = model_of("llama"), prompt(400)
    family = model_family(model)
    path = image_dir / "small.img"
    blockkv.format(path, size="8MiB", average_chunk="64KiB")
    cache = computed(model, tokens)
    with blockkv.open(path, evict=False) as store, caplog.at_level(logging.WARNING, "blockkv"):
        store.put("in the way", bytes(store.stats()["free_bytes"] - (400 << 10)))
        stored = save(store, cache, tokens, family)
        assert 0 < stored < 400
        assert "not stored" in caplog.text
        assert load(store, tokens, family, config=model.config)[1] == stored


def test_a_closed_store_is_an_error(image: Path) -> None:
    model, tokens = model_of("llama"), prompt(100)
    store = blockkv.open(image)
    store.close()
    with pytest.raises(StoreClosed):
        load(store, tokens, model_family(model), config=model.config)
    with pytest.raises(StoreClosed):
        save(store, computed(model, tokens), tokens, model_family(model))


# -- what is refused ---------------------------------------------------------------------------------------


def test_caches_that_cannot_be_kept_are_named(store: blockkv.Store) -> None:
    model = model_of("llama")
    family = model_family(model)
    tokens = prompt(100)
    cache = computed(model, tokens)
    refused: list[tuple[str, Any, Any]] = [
        ("batch of 2", computed(model, tokens.repeat(2, 1)), tokens),
        ("holds 100 tokens, but only 99", cache, tokens[:, :99]),
        ("holds float32.*float16", cache, tokens),
        ("Fp8QuantizedLayer", Cache(layers=[Fp8QuantizedLayer()]), tokens),
        ("DynamicIndexedLayer", Cache(layers=[DynamicIndexedLayer()]), tokens),
        ("EncoderDecoderCache: keep its self_attention_cache", EncoderDecoderCache(cache, cache), tokens),
        ("no transformers cache", ((torch.zeros(1), torch.zeros(1)),), tokens),
        ("of one sequence", cache, tokens.repeat(2, 1)),
    ]
    for message, what, ids in refused:
        named = replace(family, dtype="float16") if "float16" in message else family
        with pytest.raises(InvalidArgument, match=message):
            save(store, what, ids, named)
    with pytest.raises(InvalidArgument, match="Fp8QuantizedLayer"):
        load(store, tokens, family, cache=Cache(layers=[Fp8QuantizedLayer()]))
    older = computed(model_of("lfm"), tokens)
    older.layers[0].conv_states = older.layers[0].conv_states[0]
    with pytest.raises(InvalidArgument, match="conv state as a Tensor"):
        save(store, older, tokens, model_family(model_of("lfm")))
    oldest = StaticCache(config=model.config, max_cache_len=200)
    del oldest.layers[1].cumulative_length
    with pytest.raises(InvalidArgument, match="how many tokens"):
        load(store, tokens, family, cache=oldest)
    with pytest.raises(InvalidArgument, match="holds tokens already"):
        load(store, tokens, family, cache=cache)
    with pytest.raises(InvalidArgument, match="no layers yet"):
        load(store, tokens, family, cache=DynamicCache())
    with pytest.raises(InvalidArgument, match="give config="):
        load(store, tokens, family)
    assert not list(store.keys())


def states_only() -> Any:
    return MambaForCausalLM(
        MambaConfig(vocab_size=VOCABULARY_COUNT, hidden_size=32, num_hidden_layers=2, state_size=8)
    ).eval()


def test_states_do_not_count_their_tokens(store: blockkv.Store) -> None:
    """What `generate` returns has one token more than its cache has seen."""
    model, tokens = states_only(), prompt(100)
    family = model_family(model)
    cache = computed(model, tokens[:, :99])
    with pytest.raises(InvalidArgument, match="give held="):
        save_cache(store, cache, tokens, family)
    with pytest.raises(InvalidArgument, match="held is 0"):
        save_cache(store, cache, tokens, family, held=0)
    with pytest.raises(InvalidArgument, match="101 tokens"):
        save_cache(store, cache, tokens, family, held=101)
    assert save_cache(store, cache, tokens, family, held=99) == 99
    restored, held = load_prefix(store, tokens, family, config=model.config)
    assert held == 99
    expected = go_on(model, computed(model, tokens[:, :99]), tokens[:, 99:])
    assert torch.equal(go_on(model, restored, tokens[:, 99:]), expected)
    attention = model_of("llama")
    with pytest.raises(InvalidArgument, match="held is 50, but the cache holds 100"):
        save_cache(store, computed(attention, tokens), tokens, model_family(attention), held=50)


def test_a_batch_is_refused_where_only_states_or_the_target_tell(store: blockkv.Store) -> None:
    tokens = prompt(100)
    states = states_only()
    with pytest.raises(InvalidArgument, match="batch of 2"):
        save_cache(store, computed(states, tokens.repeat(2, 1)), tokens, model_family(states), held=100)
    model = model_of("llama")
    family = model_family(model)
    save(store, computed(model, tokens), tokens, family)
    used = computed(model, tokens.repeat(2, 1), "static")
    with torch.inference_mode():
        used.reset()
    with pytest.raises(InvalidArgument, match="batch of 2"):
        load(store, tokens, family, cache=used)


# -- as it is shown ----------------------------------------------------------------------------------------


def test_the_example_runs_twice_on_one_device(image_dir: Path) -> None:
    device = image_dir / "example.img"
    device.touch()
    os.truncate(device, 128 << 20)
    for expected in ("0 of 2424", "2304 of 2424"):
        done = subprocess.run(
            [sys.executable, ROOT / "examples" / "transformers_prefix.py", "--device", device],
            cwd=image_dir,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        first, second, last_line = done.stdout.splitlines()
        assert first.startswith(f"{expected} tokens from the store")
        assert second.startswith("2304 of 2424 tokens from the store")
        assert last_line == "without a store the answers are the same"
