"""A turn is a text, or texts with images and videos between them."""

from __future__ import annotations

from protocol.messages.media import Detail, Media, Modality
from protocol.messages.text import Respond, Role, Turn

CAT = Media(Modality.IMAGE, "data:image/png;base64,AAAA", Detail.LOW, "messages[0].content[1].image_url.url")
DOG = Media(Modality.VIDEO, "https://a.example/dog.mp4")
PLAIN = Turn(Role.SYSTEM, "be brief")
MIXED = Turn(Role.USER, ("what is ", CAT, "and ", DOG, "?"))


def test_a_turn_of_text_is_its_text_and_has_no_media() -> None:
    assert (PLAIN.text, PLAIN.media) == ("be brief", ())


def test_a_turn_with_media_has_its_texts_joined_and_its_media_in_their_order() -> None:
    assert (MIXED.text, MIXED.media) == ("what is and ?", (CAT, DOG))
    assert Turn(Role.USER, (CAT,)).text == ""


def test_a_request_has_the_media_of_all_turns_in_their_order() -> None:
    assert Respond("r", (PLAIN, MIXED, PLAIN, Turn(Role.USER, (DOG,)))).media == (CAT, DOG, DOG)
    assert Respond("r", (PLAIN,)).media == ()
    assert Respond("r", texts=("a",)).media == ()
