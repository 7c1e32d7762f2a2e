"""What the tiny vision-language model learns: chats about drawn pictures and videos, as the tensors that it takes.

make_tiny.py has the plain text, shapes.py the pictures with their questions and answers.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jinja2 import Template
from make_tiny import CONTEXT, END_OF_TEXT, IM_END, IM_START, VOCAB_SIZE, Writer
from shapes import COLOURS, DIRECTIONS, NUMBERS, ORDINALS, SHAPES, Artist, Scene
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer, Qwen2VLProcessor

VISION = VISION_START, VISION_END, VISION_PAD, IMAGE_PAD, VIDEO_PAD = (
    "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
MERGE, FRAMES_PER_PATCH = 2, 2  # patches a side become one token; frames become one patch
FRAMES = (4, 6, 8)  # of a video
IGNORED = -100  # what torch's losses leave out
# How many names a token can have of each kind: its colour or none, its shape, how many equal shapes there are, how many
# shapes at all, whether it is of the first group or the second, and where it moves if it does.
NAMES = len(COLOURS) + 1, len(SHAPES), len(NUMBERS), len(NUMBERS), 2, len(DIRECTIONS) + 1

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- elif message['content'] -%}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url') -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] in ('video', 'video_url') -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'text' -%}{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


render = Template(CHAT_TEMPLATE).render


Medium = tuple[Scene, list[np.ndarray]]  # with its frames as arrays


@dataclass(frozen=True)
class Example:
    """A chat as text, its media in the order of their placeholders, and the place of the only one it is about."""

    text: str
    media: tuple[Medium, ...] = ()
    about: int | None = None


class Teacher:
    """A maker of random examples."""

    def __init__(self, seed: int) -> None:
        """Start from the seed alone."""
        self.random, self.artist, self.writer = random.Random(seed), Artist(seed), Writer(seed)

    def size(self, largest: int) -> tuple[int, int]:
        """Return a width and a height in pixels, of which neither is twice the other."""
        width = self.random.randint(112, largest)
        return width, min(largest, max(112, round(width * self.random.uniform(0.75, 1.33))))

    def picture(self, size: tuple[int, int]) -> Medium:
        """Return a drawn picture."""
        scene = self.artist.picture(size[0] / size[1])
        return scene, self.artist.draw(scene, *size)

    def video(self, size: tuple[int, int], frames: int) -> Medium:
        """Return a drawn video."""
        scene = self.artist.video(frames)
        return scene, self.artist.draw(scene, *size)

    def clip(self, size: tuple[int, int]) -> Medium:
        """Return two frames of a video, which become one patch."""
        scene = self.artist.video(self.random.choice(FRAMES))
        start = self.random.randrange(0, len(scene.frames), FRAMES_PER_PATCH)
        scene = Scene(scene.frames[start : start + FRAMES_PER_PATCH], scene.groups, scene.direction)
        return scene, self.artist.draw(scene, *size)

    def chat(self, media: Sequence[Medium] = ()) -> Example:
        """Return a chat of one question about the media and its answer, or one of plain text."""
        if media or self.random.random() < 0.3:
            question, answer = self.artist.question([scene for scene, _ in media])
        else:
            question, answer = self.random.choice((self.writer.small_talk, self.writer.capital))()
        kinds = [{"type": "video" if scene.is_video else "image"} for scene, _ in media]
        text = {"type": "text", "text": question}
        content = [text, *kinds] if self.random.random() < 0.2 else [*kinds, text]
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        about = next((place for place, name in enumerate(ORDINALS) if media and f" {name} " in question), None)
        return Example(render(messages=turns), tuple(media), about)

    def examples(self, kind: str, rows: int) -> list[Example]:
        """Return so many examples of one kind: a text, a picture of any or small size, a few, a clip or a video."""
        if kind == "text":
            return [self.chat() for _ in range(rows)]
        # Media of one size are preprocessed together, so all are of one.
        size, frames = self.size(224 if kind == "picture" else 168), self.random.choice(FRAMES)
        if kind == "clip":
            return [self.chat([self.clip(size)]) for _ in range(rows)]
        if kind == "video":
            return [self.chat([self.video(size, frames)]) for _ in range(rows)]
        counts = [self.random.choice((2, 3)) if kind == "pictures" else 1 for _ in range(rows)]
        return [self.chat([self.picture(size) for _ in range(count)]) for count in counts]


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Train the tokenizer and give it the chat template."""
    tokenizer = Tokenizer(models.BPE())
    # transformers splits text for a Qwen2-VL by these rules, whatever tokenizer.json says.
    rules = Qwen2Tokenizer().backend_tokenizer
    tokenizer.normalizer, tokenizer.pre_tokenizer = rules.normalizer, rules.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    special = [END_OF_TEXT, IM_START, IM_END, *VISION]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    # Only ASCII is merged: every other character takes one token a byte, as in examples/tiny.
    tokenizer.train_from_iterator((text.encode("ascii", "ignore").decode() for text in texts), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        additional_special_tokens=list(VISION),
        clean_up_tokenization_spaces=False,
    )


class Batch:
    """Examples as the tensors that the model takes."""

    def __init__(self, processor: Qwen2VLProcessor, examples: Sequence[Example]) -> None:
        """Encode and pad the examples, and preprocess their media."""
        tokenizer = processor.tokenizer
        image, video, end = (tokenizer.convert_tokens_to_ids(token) for token in (IMAGE_PAD, VIDEO_PAD, IM_END))
        header = tokenizer.encode(f"{IM_START}assistant\n")
        self.media = [medium for example in examples for medium in example.media]
        self.inputs = self.preprocess(processor)
        grids = {image: iter(self.grids("image_grid_thw")), video: iter(self.grids("video_grid_thw"))}
        comma = tokenizer.convert_tokens_to_ids(",")  # stands in an answer only before what the next picture shows
        rows, weights, places = [], [], []
        for example in examples:
            row, seen, place = [], [], 0
            for token in tokenizer.encode(example.text):
                count = math.prod(next(grids[token])) // MERGE**2 if token in grids else 1
                row += [token] * count
                seen += [place if token in grids else IGNORED] * count
                place += token in grids
            wanted = answer_weights(row, header, end)
            if place > 1:
                start = wanted.index(1.0)
                for at in range(start, len(row)):
                    if wanted[at]:
                        seen[at - 1] = row[start:at].count(comma) if example.about is None else example.about
            rows.append(row)
            weights.append(wanted)
            places.append(seen)
        self.ids = padded(rows, tokenizer.pad_token_id)
        self.weights = padded(weights, 0.0)
        # Which of the media a token belongs to, or the next token of an answer is about.
        self.places = padded(places, IGNORED)
        self.types = (self.ids == image) + 2 * (self.ids == video)

    def preprocess(self, processor: Qwen2VLProcessor) -> dict[str, torch.Tensor]:
        """Return the pixels and grids of the media."""
        pictures = [torch.tensor(frames[0]).permute(2, 0, 1) for scene, frames in self.media if not scene.is_video]
        videos = [torch.tensor(np.stack(frames)).permute(0, 3, 1, 2) for scene, frames in self.media if scene.is_video]
        inputs = {}
        if pictures:
            inputs |= processor.image_processor(images=pictures, return_tensors="pt")
        if videos:
            inputs |= processor.video_processor(videos=videos, return_tensors="pt")
        return inputs

    def grids(self, name: str) -> list[list[int]]:
        """Return the grids of all pictures or all videos."""
        return self.inputs[name].tolist() if name in self.inputs else []

    def cells(self, *, videos: bool) -> torch.Tensor:
        """Return what is to be seen at each token of the pictures, or of the videos: see `cells`."""
        grids = iter(self.grids("video_grid_thw" if videos else "image_grid_thw"))
        names = [cells(*medium, next(grids)) for medium in self.media if medium[0].is_video == videos]
        return torch.cat(names, 1)


def cells(scene: Scene, frames: Sequence[np.ndarray], grid: Sequence[int]) -> torch.Tensor:
    """Return what is to be seen at each token of a picture or a video: a row of each of `NAMES`.

    A token that no shape covers the middle of has no colour, and its other names but the number of shapes are ignored.
    """
    steps, height, width = grid[0], grid[1] // MERGE, grid[2] // MERGE
    names = torch.full((len(NAMES), steps, height, width), IGNORED)
    names[0] = len(COLOURS)
    names[3] = sum(count for count, _, _ in scene.groups) - 1
    direction = list(DIRECTIONS).index(scene.direction) if scene.direction else len(DIRECTIONS)
    high, wide = frames[0].shape[:2]
    down, across = (torch.arange(height)[:, None] + 0.5) / height, (torch.arange(width) + 0.5) / width
    for step in range(steps):
        for item in scene.frames[min(step * FRAMES_PER_PATCH, len(scene.frames) - 1)]:
            distance = torch.hypot((down - item.y) * high, (across - item.x) * wide)
            covered = (distance < 0.8 * item.radius * min(high, wide)) | (distance == distance.min())
            kinds = [each[1:] for each in scene.groups]
            place = kinds.index((item.colour, item.shape))
            own = (
                list(COLOURS).index(item.colour),
                SHAPES.index(item.shape),
                scene.groups[place][0] - 1,
                int(names[3, 0, 0, 0]),
                place,
                direction,
            )
            names[:, step, covered] = torch.tensor(own)[:, None]
    return names.flatten(1)


def answer_weights(ids: Sequence[int], header: Sequence[int], end: int) -> list[float]:
    """Return 1 for each token of an answer and its end, 0 for what the model is not to learn."""
    weights, answering = [], False
    for place, token in enumerate(ids, 1):
        weights.append(float(answering))
        answering = (answering and token != end) or list(ids[max(0, place - len(header)) : place]) == header
    return weights


def padded(rows: Sequence[Sequence[float]], padding: float) -> torch.Tensor:
    """Return the rows, made equally long, as a tensor."""
    length = max(map(len, rows))
    return torch.tensor([[*row, *[padding] * (length - len(row))] for row in rows])
