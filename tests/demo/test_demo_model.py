"""The model's cache cut into chunks and put together again: same bytes, same logits."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from blockkv.demo.model import ByteLlama, Geometry, tokenize  # noqa: E402
from blockkv.demo.worker import prompt_text  # noqa: E402

CHUNK_TOKENS = 32
SMALL = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=32, feed_forward=64)


@pytest.fixture(scope="module")
def model() -> ByteLlama:
    return ByteLlama(SMALL)


def test_the_shipped_text_is_long_enough_and_plain() -> None:
    text = prompt_text()
    assert len(text) > 4096
    assert text.isascii()
    assert text.startswith(b"The words of the Preacher")


def test_weights_come_from_the_seed_and_the_digest_names_them(model: ByteLlama) -> None:
    assert ByteLlama(SMALL).digest == model.digest
    assert ByteLlama(Geometry(layers=1, query_heads=4, head_dim=32, feed_forward=64)).digest != model.digest


@pytest.mark.parametrize("restored_chunks", [1, 3])
def test_logits_after_a_restored_prefix_are_identical(model: ByteLlama, restored_chunks: int) -> None:
    tokens = tokenize(prompt_text()[:150])
    chunks = torch.empty((4, *model.geometry.chunk_shape(CHUNK_TOKENS)))
    cache = model.empty_cache()
    expected = []
    for first, end, logits in model.prefill(tokens, cache, 0, CHUNK_TOKENS):
        if end - first == CHUNK_TOKENS:
            model.extract(cache, first, end, chunks[first // CHUNK_TOKENS])
        expected.append(logits)

    restored = model.restore(chunks[:restored_chunks])
    assert restored.get_seq_length() == restored_chunks * CHUNK_TOKENS
    actual = [
        logits
        for _, _, logits in model.prefill(tokens, restored, restored_chunks * CHUNK_TOKENS, CHUNK_TOKENS)
    ]
    assert torch.equal(
        torch.stack(expected[restored_chunks:]).view(torch.int32), torch.stack(actual).view(torch.int32)
    )


def test_a_wrong_cache_is_noticed(model: ByteLlama) -> None:
    """The comparison above can fail: one flipped bit of stored KV shows in the logits."""
    tokens = tokenize(prompt_text()[:64])
    cache = model.empty_cache()
    chunk = torch.empty((1, *model.geometry.chunk_shape(CHUNK_TOKENS)))
    logits = []
    for first, end, last in model.prefill(tokens, cache, 0, CHUNK_TOKENS):
        if first == 0:
            model.extract(cache, first, end, chunk[0])
        logits.append(last)
    chunk.view(torch.int32)[0, 1, 1, 0, 5, 7] ^= 1 << 22
    damaged = next(model.prefill(tokens, model.restore(chunk), CHUNK_TOKENS, CHUNK_TOKENS))[2]
    assert not torch.equal(logits[1], damaged)
