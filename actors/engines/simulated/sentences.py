"""The sentences that simulated engines answer with."""

SENTENCES = (
    "The river is wide, and the old bridge is made of stone.",
    "Nobody in the village remembers who planted the walnut tree.",
    "In the morning the market smells of bread and oranges.",
    "A slow train crosses the plain twice a day.",
    "She counted the swallows on the wire, and there were nine.",
    "The café by the harbour opens when the boats come home.",
    "Snow fell all night, so the road to the mill is closed.",
    "He keeps his letters in a blue tin under the stairs.",
    "The clock in the tower is five minutes late, as always.",
    "After the rain the hills look closer than they are.",
    "Two dogs sleep in front of the bakery, one of them very old.",
    "The orchestra tunes its strings while the hall fills.",
)
