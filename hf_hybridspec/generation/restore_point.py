"""A call that fails leaves its cache as it found it, so that the next call on the same objects is right."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..modeling.cache_layers import GatedDeltaLayer
from ..modeling.hybrid_cache import HybridCache


@contextmanager
def restored_on_failure(cache: HybridCache) -> Iterator[None]:
    """Puts tokens, states and drafter context of `cache` back if the body raises anything, even an interrupt.

    A failure may come in the middle of a forward, when some layers have run and others have not. Of a filled cache the
    GDN states are copied (a few MiB a layer); an empty one costs nothing.
    """
    cache.discard_block()
    length, token_ids = cache.committed_length, cache.token_ids
    kept = None if cache.drafter_context is None else cache.drafter_context.fork()
    states = _clone_states(cache) if length else {}
    try:
        yield
    except BaseException:
        cache.stop_recording()
        if length:
            _restore_layers(cache, length, states)
        else:
            cache.reset()
        cache.token_ids, cache.drafter_context = token_ids, kept
        raise


def _clone_states(cache: HybridCache) -> dict:
    return {
        index: (layer.conv_states[0].clone(), layer.recurrent_states[0].clone())
        for index, layer in enumerate(cache.layers)
        if isinstance(layer, GatedDeltaLayer)
    }


def _restore_layers(cache: HybridCache, length: int, states: dict) -> None:
    for index, layer in enumerate(cache.layers):
        if index in states:
            # In place: the layer's states may be views of a stack.
            layer.conv_states[0].copy_(states[index][0])
            layer.recurrent_states[0].copy_(states[index][1])
        else:
            layer.crop(length - int(layer.get_seq_length()))
