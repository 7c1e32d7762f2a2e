"""The check of engines that other nodes announce: what they say applies to all clients of a model."""

from __future__ import annotations

from protocol.errors import PeerViolation
from protocol.messages.adapters import ADAPTERS_MAX, Adapter, name_mistake
from protocol.messages.cluster import COUNT_MAX, RANKS_MAX, Leg, Offer, engine_and_rank
from protocol.messages.embedding import EmbeddingInfo, EmbeddingOutput
from protocol.messages.engine import EngineInfo
from protocol.messages.generation import GrammarKind
from protocol.messages.media import MediaForm, MediaInfo
from protocol.model_folder import WORD_MAX
from protocol.weights_record import WeightsRecord

ENGINE_NAME_LENGTH_MAX = 128  # of the kind, the version and the operations of an engine, which clients are shown
OPERATIONS_MAX = 128  # of one engine, of which a later version may have more than this one
ADDRESS_BYTES_MAX = 1024  # for hand-offs
WEIGHTS_TEXT_LENGTH_MAX = 4096  # of a version, a checksum and a folder
WIDTH_MAX = 65_536  # numbers in a vector
WIDTHS_MAX = 64  # lengths of vectors that a model was trained for
TERMS_MAX = 32  # of one engine, which a later version may add to


def check_engine(offer: Offer) -> None:
    """Raise `PeerViolation` for an offer whose engine has impossible limits; one that was never up has none."""
    name, engine = offer.name, offer.engine
    if engine is None:
        return
    if not (_is_possible(offer.leg, engine) and _is_possible_record(offer.weights)):
        raise PeerViolation(f"offer {name} has an engine that cannot be")
    if engine_and_rank(name)[1] >= engine.data_parallel:
        raise PeerViolation(f"offer {name} is a rank of an engine with {engine.data_parallel}")
    if max(len(engine.kind), len(engine.version)) > ENGINE_NAME_LENGTH_MAX or len(engine.grammars) > len(GrammarKind):
        raise PeerViolation(f"offer {name} has an engine whose kind, version or grammars are too long")
    if (length := len(engine.hand_off_address or b"")) > ADDRESS_BYTES_MAX:
        raise PeerViolation(f"offer {name} has an address for hand-offs of {length} bytes")
    longest = max((len(text) for term in engine.hand_off_terms for text in term), default=0)
    if len(engine.hand_off_terms) > TERMS_MAX or longest > ENGINE_NAME_LENGTH_MAX:
        raise PeerViolation(f"offer {name} has an engine with too many terms of hand-offs, or too long ones")
    if len(engine.operations) > OPERATIONS_MAX or max(map(len, engine.operations), default=0) > ENGINE_NAME_LENGTH_MAX:
        raise PeerViolation(f"offer {name} has an engine with too many operations, or too long names of them")
    if len(engine.adapters) > ADAPTERS_MAX or not all(map(_is_possible_adapter, engine.adapters)):
        raise PeerViolation(f"offer {name} has an engine with too many adapters, or with names that cannot be")
    if not _is_possible_media(engine.media, required=offer.leg is Leg.ENCODE):
        raise PeerViolation(f"offer {name} has an engine that takes images or videos which cannot be")


def _is_possible(leg: Leg, engine: EngineInfo) -> bool:
    """Whether the limits of an engine can be; an encoder has no limits of tokens, and an embedder no KV memory."""
    tokens = (engine.vocabulary_size, engine.context_max, engine.kv_tokens_max, engine.request_tokens_max)
    own = (*tokens, engine.page_size)
    shared = (engine.running_max, engine.ranks, engine.data_parallel)
    if not _is_possible_embedding(engine.embedding, required=leg is Leg.EMBED):
        return False
    needed = {Leg.ENCODE: (), Leg.EMBED: (engine.vocabulary_size, engine.request_tokens_max)}.get(leg, own)
    counts = (*needed, *shared)
    if min(own) < 0 or max(own) > COUNT_MAX:
        return False
    if min(counts) < 1 or max(counts) > COUNT_MAX or engine.data_parallel > RANKS_MAX:
        return False
    return leg is not Leg.ENCODE or not any(own)


def _is_possible_record(weights: WeightsRecord) -> bool:
    longest = max(len(weights.version), len(weights.checksum), len(weights.folder))
    return 0 <= weights.serial <= COUNT_MAX and longest <= WEIGHTS_TEXT_LENGTH_MAX


def _is_possible_adapter(adapter: Adapter) -> bool:
    return name_mistake(adapter.name) is None and 0 < len(adapter.digest) <= WORD_MAX


def _is_possible_embedding(embedding: EmbeddingInfo | None, *, required: bool) -> bool:
    """Whether the vectors of an engine can be; only an embedder has any."""
    if embedding is None or not required:
        return embedding is None and not required
    shorter = embedding.matryoshka_dimensions
    is_score = embedding.output is EmbeddingOutput.SCORES
    if not 1 <= embedding.width <= (1 if is_score else WIDTH_MAX) or len(shorter) > WIDTHS_MAX:
        return False
    return all(1 <= number <= embedding.width for number in shorter)


def _is_possible_media(media: MediaInfo | None, *, required: bool) -> bool:
    if media is None:
        return not required
    if required and media.form is not MediaForm.EMBEDDINGS:
        return False
    special = (media.image_token, media.video_token, media.start_token)
    sizes = (media.width, media.merge)
    return 1 <= min(sizes) <= max(sizes) <= COUNT_MAX and all(
        token is None or 0 <= token <= COUNT_MAX for token in special
    )
