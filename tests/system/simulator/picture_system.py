"""The part of a system that has to do with images and videos: the media actor, the encode leg, and encoders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

import trio
from attrs import define, field, frozen

from actors.kit.calls import Address, Call, mailbox
from actors.media.media import PreparationLimits, media
from actors.media.preparation import Vision
from actors.routing.encoding import Encoding
from actors.routing.ports import RoutingObserver
from actors.routing.route import FailoverLimits
from protocol.messages.media import MediaPrepared, PrepareMedia
from supervisor.cluster.directory import Directory
from supervisor.cluster.model_pool import ModelPool
from supervisor.node.vision import encode_items
from supervisor.supervision.tree import Child
from tests.rig.small_system import SmallSystem
from tests.system.simulator.encoders import EncoderCosts, Gallery, NodeEncoders
from tests.system.simulator.media import LIMITS, SimMedia
from tests.system.simulator.pictures import Album

PREPARATIONS_WAITING_MAX = 16


@frozen
class _EncodeObserver(RoutingObserver):
    """Passes on that an item is encoded elsewhere."""

    resumed: Callable[[str, int], None]

    def call_resumed(self, code: str, sent: int) -> None:
        self.resumed(f"encode {code}", sent)


@define(eq=False)
class PictureSystem(SmallSystem):
    """A system whose model takes images and videos, if its engines do."""

    album: Album | None = None  # of the pictures that its clients send, if they do
    encoders: int = 0  # on the node with the workers
    encoder_costs: EncoderCosts = field(factory=EncoderCosts)
    gallery: Gallery = field(factory=Gallery)
    media_limits: PreparationLimits = LIMITS
    media_delay_s: float = 0.0
    media: SimMedia = field(init=False)
    encoding: NodeEncoders = field(init=False)
    _media_address: Address[PrepareMedia, MediaPrepared, None] = field(init=False)
    _media_inbox: trio.MemoryReceiveChannel[Call[PrepareMedia, MediaPrepared, None]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        SmallSystem.__attrs_post_init__(self)
        self.media = SimMedia(self.rng or Random(0), self.gallery, self.media_limits, self.media_delay_s)
        self._media_address, self._media_inbox = mailbox(PREPARATIONS_WAITING_MAX)

    @property
    def sighted(self) -> bool:
        """Whether its model takes pictures."""
        return self.costs.media is not None

    def node_encoders(self, directory: Directory) -> NodeEncoders:
        """Return the encoders of this process, once they are in a directory."""
        return NodeEncoders(directory, self.encoders, self.encoder_costs, self.gallery, self.rng or Random(0))

    def media_children(self) -> tuple[Child, ...]:
        """Return the media actor, if its model takes pictures."""
        if not self.sighted:
            return ()
        return (Child(name="media", run=media, args=(self._media_inbox, self.media.preparations)),)

    def vision(
        self,
        directory: Directory,
        limits: FailoverLimits,
        new_id: Callable[[], str],
        resumed: Callable[[str, int], None],
    ) -> Vision:
        """Return what `supervisor.node.vision` makes for the processor; `resumed` is told what is encoded elsewhere."""
        encoding = Encoding(ModelPool(directory, "tiny"), limits, new_id, _EncodeObserver(resumed))
        return Vision("tiny", self._media_address, partial(encode_items, encoding))

    def heal_pictures(self) -> None:
        """Remove all faults of pictures."""
        self.media.heal()
        self.encoding.heal()

    def check_no_pictures(self) -> None:
        """Check that nothing is left of any picture, with the media actor or the encoders of this process."""
        self.media.check_free()
        self.encoding.check_idle()
        inbox = self._media_inbox.statistics()
        assert (inbox.current_buffer_used, inbox.tasks_waiting_send) == (0, 0), "pictures wait for the media actor"
